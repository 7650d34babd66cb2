"""Unmodified models of transformers in the Trainer, in stages and split by their own plan: those of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from mesh_program import Rows, whole
from ranks import run_ranks
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import loopwright as lw
from loopwright.strategies import MeshStrategy

pytest.importorskip("transformers", minversion="5.0", reason="plans of transformers 5")

from transformers_models import Wide, batch, model  # transformers may be absent

# Any in this file: models of transformers, and results that travel between processes.

SAMPLES = 24


class Program(lw.Module):
    """Trains a model on the loss that it returns.

    Args:
        kind: See `model`.
        is_wide: Whether norms and losses compute in float64, too.
    """

    def __init__(self, kind: str, *, is_wide: bool) -> None:
        super().__init__()
        self.model = model(kind)
        self.is_wide = is_wide

    def loss(self, inputs: dict[str, Tensor]) -> Tensor:
        if not self.is_wide:
            return self.model(**inputs).loss
        with Wide():
            return self.model(**inputs).loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, batch_size=4)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch), batch_size=4)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3, eps=1e-4)


class Samples(Dataset[dict[str, Tensor]]):
    def __init__(self, kind: str) -> None:
        self.all = batch(kind, 7, SAMPLES)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: one[index] for name, one in self.all.items()}


def train(rank: int, size: int, kind: str, ways: list[dict[str, int]], is_wide: bool) -> list[Any]:
    """Return full weights and logged rows for each mesh; {} is one process."""
    found = []
    for axes in ways:
        lw.seed_everything(1, verbose=False)
        module, rows = Program(kind, is_wide=is_wide), Rows()
        trainer = lw.Trainer(
            accelerator="cpu", strategy=MeshStrategy(**{"fsdp": 1, **axes}) if axes else "auto", devices=size,
            precision="64-true", max_epochs=1, logger=rows, accumulate_grad_batches=2, gradient_clip_val=0.5,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, log_every_n_steps=1,
        )  # fmt: skip
        loaders = [DataLoader(Samples(kind), batch_size=4) for _ in range(2)]
        trainer.fit(module, *loaders)
        found.append((whole(module), rows.rows))
    return found


def differences(kind: str, ways: list[dict[str, int]], size: int, *, is_wide: bool) -> list[tuple[float, float]]:
    """Return the largest differences of weights and of logged values from one process, by mesh."""
    (((weights, rows),),) = run_ranks(train, 1, kind, [{}], is_wide, connect=False)
    everywhere = run_ranks(train, size, kind, ways, is_wide, connect=False)
    result = []
    for number in range(len(ways)):
        found: dict[str, Tensor] = {}
        for one in everywhere:
            found.update(one[number][0])
        assert found.keys() == weights.keys()
        of_weights = max(float((found[name] - value).abs().max()) for name, value in weights.items())
        logged = next(one[number][1] for one in everywhere if one[number][1])
        assert [(step, row.keys()) for step, row in logged] == [(step, row.keys()) for step, row in rows]
        pairs = [(row[key], wanted[key]) for (_, row), (_, wanted) in zip(logged, rows, strict=True) for key in wanted]
        result.append((of_weights, max(abs(ours - theirs) for ours, theirs in pairs)))
    return result


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3", "gpt2", "bert", "vit"])
def test_stages_and_split_layers_train_as_one_process(kind: str) -> None:
    for weights, logged in differences(kind, [{"pp": 2}, {"tp": 2}], 2, is_wide=True):
        assert weights <= 1e-12
        assert logged <= 1e-13


@pytest.mark.parametrize("kind", ["opt", "t5", "bart"])
def test_stages_whose_blocks_share_inputs_train_as_one_process(kind: str) -> None:
    [(weights, logged)] = differences(kind, [{"pp": 2}], 2, is_wide=True)
    assert weights <= 1e-12
    assert logged <= 1e-13


def test_norms_in_float32_are_the_cause_of_larger_differences() -> None:
    # Their input differs by rounding errors of float64, of which a few change the rounding to float32.
    ways = [{"pp": 2}, {"tp": 2}]
    for weights, logged in differences("gemma3", ways, 2, is_wide=False):
        assert weights <= 1e-8
        assert logged <= 1e-7


def test_stages_of_split_layers_train_as_one_process() -> None:
    for weights, logged in differences("llama", [{"pp": 2, "tp": 2}], 4, is_wide=True):
        assert weights <= 1e-12
        assert logged <= 1e-13
