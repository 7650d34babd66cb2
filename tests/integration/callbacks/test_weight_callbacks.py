"""Callbacks that change weights, on two ranks against one process: the same batches, the same weights.

All of it in float64, where the order of additions shows at 1e-16.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import loopwright as lw
from loopwright.callbacks import (
    BackboneFinetuning,
    Callback,
    EMAWeightAveraging,
    ModelCheckpoint,
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
)
from loopwright.strategies import DDPStrategy

State = dict[str, Tensor]

MAKE: dict[str, Any] = {
    "mean": WeightAveraging,
    "ema": lambda: EMAWeightAveraging(decay=0.5, update_every_n_steps=2),
    "swa": lambda: StochasticWeightAveraging(0.05, 2, 2),
    "backbone": lambda: BackboneFinetuning(1, train_bn=False),
    "l1": lambda: ModelPruning("l1_unstructured", amount=0.3),
    "random": lambda: ModelPruning("random_unstructured", amount=0.3, resample_parameters=True),
}


class Net(lw.Module):
    def __init__(self, *, norm: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.backbone = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8) if norm else nn.Tanh()).double()
        self.head = nn.Linear(8, 1).double()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return (self.head(self.backbone(batch[0])) - batch[1]).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("error", self.training_step(batch, batch_idx))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([one for one in self.parameters() if one.requires_grad], lr=0.1, momentum=0.9)


def fit(
    rank: int, size: int, name: str, *, ckpt_path: Any = None, save: Any = None, norm: bool = False, epochs: int = 3
) -> tuple[State, float]:
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(32, 6, generator=generator, dtype=torch.float64)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    # A rank has half of each global batch.
    train, val = DataLoader(data, batch_size=8 // size), DataLoader(data, batch_size=16)
    callbacks: list[Callback] = [MAKE[name]()] if name else []
    if save is not None:
        callbacks.append(ModelCheckpoint(save, save_top_k=-1, every_n_train_steps=3, filename="{step}"))
    trainer = lw.Trainer(
        accelerator="cpu", strategy=DDPStrategy() if size > 1 else "auto", devices=size, callbacks=callbacks,
        logger=False, enable_checkpointing=save is not None, enable_progress_bar=False, enable_model_summary=False,
        max_epochs=epochs, num_sanity_val_steps=0, precision="64-true",
    )  # fmt: skip
    module = Net(norm=norm)
    trainer.fit(module, train, val, ckpt_path=ckpt_path)
    state = {key: value.clone() for key, value in module.state_dict().items()}
    return state, float(trainer.callback_metrics["error"])


def assert_equal(one: State, other: State, *, tolerance: float = 0.0) -> None:
    for name, value in one.items():
        torch.testing.assert_close(
            value, other[name], rtol=tolerance, atol=tolerance, msg=lambda text, n=name: f"{n}: {text}"
        )


@pytest.mark.parametrize("name", ["mean", "ema", "swa", "backbone", "l1"])
def test_two_ranks_train_as_one_process(name: str) -> None:
    (first, error), (second, _) = run_ranks(fit, 2, name, connect=False)
    alone, error_alone = fit(0, 1, name)
    assert_equal(first, second)
    assert_equal(first, alone, tolerance=1e-12)
    assert error == pytest.approx(error_alone, rel=1e-12)


def test_rank_zeros_chance_holds_on_all_ranks() -> None:
    (first, _), (second, _) = run_ranks(fit, 2, "random", connect=False)
    assert_equal(first, second)
    weights = torch.cat([value.flatten() for value in first.values()])
    assert float((weights == 0).double().mean()) == pytest.approx(1 - 0.7**3, abs=0.05)


@pytest.mark.parametrize("name", ["mean", "swa"])
def test_batch_norms_are_the_same_on_all_ranks_at_the_end(name: str) -> None:
    (first, _), (second, _) = run_ranks(fit, 2, name, norm=True, connect=False)
    assert_equal(first, second)
    if name == "swa":  # 8 batches of 4 samples on each of two ranks went by
        assert first["backbone.1.num_batches_tracked"] == 8


@pytest.mark.parametrize("name", ["swa", "backbone", "random", "ema"])
def test_a_run_of_two_ranks_resumes_exactly(tmp_path: Path, name: str) -> None:
    (whole, _), _ = run_ranks(fit, 2, name, save=tmp_path / "whole", connect=False)
    (resumed, _), (other, _) = run_ranks(fit, 2, name, ckpt_path=tmp_path / "whole" / "step=9.ckpt", connect=False)
    assert_equal(resumed, whole)
    assert_equal(resumed, other)
