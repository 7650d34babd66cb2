"""Random numbers of pipelined steps: all stages see what a step draws, and dropout does not depend on the stages."""

from __future__ import annotations

import random
from typing import Any, cast

import numpy
import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import loopwright as lw
from loopwright.strategies import MeshStrategy, Strategy
from loopwright.strategies.mesh.pipeline import Pipeline

# Any in this file: batches, and results that travel between processes.

WIDTH, WORDS = 8, 11


class Embedding(nn.Module):
    """Draws in the first stage only."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, ids: Tensor) -> Tensor:
        return cast(Tensor, self.dropout(self.words(ids)))


class Masked(lw.Module):
    """A masked language model: the mask is drawn in the step, and changes its input and its loss."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embed = Embedding(dropout)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(dropout)) for _ in range(8)
        )
        self.head = nn.Linear(WIDTH, WORDS)
        self.masks: list[tuple[int, list[int], float, float]] = []

    def _loss(self, batch: Any, batch_idx: int) -> Tensor:
        ids = batch[0]
        mask = torch.rand(ids.shape) < 0.5
        mask[0] = True
        self.masks.append((batch_idx, mask.int().tolist(), random.random(), numpy.random.rand()))
        x = self.embed(ids.masked_fill(mask, 0))
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x)[mask], ids[mask])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self._loss(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self._loss(batch, 100 + batch_idx))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def fit(rank: int, size: int, strategy: Strategy | str, dropout: float, epochs: int) -> tuple[Any, Any, float]:
    lw.seed_everything(1, verbose=False)
    ids = torch.randint(0, WORDS, (32,), generator=torch.Generator().manual_seed(2))
    module = Masked(dropout)
    trainer = lw.Trainer(
        accelerator="cpu", strategy=strategy, devices=size, precision="64-true", max_epochs=epochs, logger=False,
        accumulate_grad_batches=4, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        num_sanity_val_steps=0,
    )  # fmt: skip
    loader = DataLoader(TensorDataset(ids), batch_size=4, shuffle=True)
    trainer.fit(module, loader, DataLoader(TensorDataset(ids), batch_size=8))
    weights = {name: value.detach().clone() for name, value in module.named_parameters()}
    return module.masks, weights, float(trainer.callback_metrics["val"])


@pytest.mark.parametrize("schedule", ["1f1b", "zbv", "interleaved"])
def test_a_mask_that_a_step_draws_is_the_same_on_all_stages(schedule: str) -> None:
    ranks = run_ranks(
        fit, 2, MeshStrategy(pp=2, pipeline=Pipeline(schedule=schedule)), 0.3, 2, connect=False
    )  # fmt: skip
    drawn = [{tuple(map(str, one)) for one in masks} for masks, _, _ in ranks]
    assert drawn[0] == drawn[1]
    assert len(drawn[0]) == 2 * (8 + 4)  # each batch of training and validation has one of its own


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_without_dropout_masks_and_weights_are_those_of_one_process(schedule: str) -> None:
    mesh = MeshStrategy(pp=2, pipeline=Pipeline(schedule=schedule))
    [(_, weights, value)] = run_ranks(fit, 1, "auto", 0.0, 2, connect=False)
    ranks = run_ranks(fit, 2, mesh, 0.0, 2, connect=False)
    found: dict[str, Tensor] = {}
    for _, own, seen in ranks:
        found.update(own)
        assert abs(seen - value) <= 1e-12
    assert all((found[name] - one).abs().max() <= 1e-12 for name, one in weights.items())


def test_dropout_does_not_depend_on_the_number_of_stages() -> None:
    found = []
    for size, schedule in ((2, "1f1b"), (4, "1f1b"), (2, "zbv")):
        weights: dict[str, Tensor] = {}
        mesh = MeshStrategy(pp=size, pipeline=Pipeline(schedule=schedule))
        for _, own, _ in run_ranks(fit, size, mesh, 0.3, 1, connect=False):
            weights.update(own)
        found.append(weights)
    for name, value in found[0].items():
        assert all((other[name] - value).abs().max() <= 1e-12 for other in found[1:]), name
