"""Usual programs on pipeline stages: frozen layers, batch norm, schedules, short windows, validation in the middle."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from mesh_program import part_of
from ranks import run_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import loopwright as lw
from loopwright.loggers import Logger
from loopwright.strategies import MeshStrategy, Strategy
from loopwright.strategies.mesh.pipeline import Pipeline

# Any in this file: batches, and results that travel between processes.

WIDTH = 6


class Net(lw.Module):
    def __init__(self, frozen: str = "", two_losses: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh()) for _ in range(4)
        )
        self.last = nn.Linear(WIDTH, 2)
        for name, parameter in self.named_parameters():
            if frozen and name.startswith(tuple(frozen.split(","))):
                parameter.requires_grad_(False)
        self.two_losses = two_losses

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return cast(Tensor, self.last(x))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        one, two = self(batch[0]).unbind(-1)
        loss = one.square().mean()
        self.log("loss", loss)
        return {"loss": loss + 0.5 * two.abs().mean(), "two": two} if self.two_losses else loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self(batch[0]).square().mean())

    def configure_optimizers(self) -> Any:
        # Biases before a batch norm have gradients of rounding errors, which a small eps would enlarge.
        trained = [one for one in self.parameters() if one.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=0.05, eps=1e-3)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
        return [optimizer], [
            {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7), "interval": "step"},
            {"scheduler": plateau, "interval": "epoch", "monitor": "val"},
        ]


class Kept(Logger):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: dict[str, float] = {}

    @property
    def name(self) -> str:
        return "kept"

    @property
    def version(self) -> str:
        return "0"

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.rows.update({f"{name} {step}": value for name, value in metrics.items() if name != "epoch"})

    def log_hyperparams(self, params: Any) -> None:
        """Keep nothing."""


def fit(rank: int, size: int, strategy: Strategy | str, arguments: dict[str, Any]) -> Any:
    lw.seed_everything(1, verbose=False)
    module, kept = Net(**arguments), Kept()
    trainer = lw.Trainer(
        accelerator="cpu", strategy=strategy, devices=size, precision="64-true", max_epochs=2, logger=kept,
        accumulate_grad_batches=3, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        gradient_clip_val=0.4, val_check_interval=6, log_every_n_steps=1,
        callbacks=[lw.callbacks.WeightStatistics(depth=1, updates=True), lw.callbacks.LearningRateMonitor()],
    )  # fmt: skip
    data = torch.randn(40, WIDTH, generator=torch.Generator().manual_seed(1))
    loader = DataLoader(TensorDataset(data), batch_size=4)  # ten batches: the last window of an epoch has one
    trainer.fit(module, loader, DataLoader(TensorDataset(data[:12]), batch_size=4))
    state = {name: value.detach().clone() for name, value in part_of(module).items()}
    return state, kept.rows, trainer.global_step


@pytest.mark.parametrize(
    ("arguments", "schedule"),
    [
        ({}, "1f1b"),
        ({}, "zbv"),
        ({"frozen": "first,blocks.0,blocks.1.0"}, "1f1b"),
        ({"frozen": "blocks"}, "1f1b"),
        ({"two_losses": True}, "zbv"),
    ],
    ids=["1f1b", "zbv", "frozen beginning", "frozen blocks", "two losses"],
)
def test_weights_buffers_and_logged_values_are_those_of_one_process(arguments: dict[str, Any], schedule: str) -> None:
    mesh = MeshStrategy(pp=2, pipeline=Pipeline(schedule=schedule))
    [(weights, rows, steps)] = run_ranks(fit, 1, "auto", arguments, connect=False)
    found: dict[str, Tensor] = {}
    ranks = run_ranks(fit, 2, mesh, arguments, connect=False)
    for state, _, count in ranks:
        found.update(state)
        assert count == steps == 8
    assert found.keys() == weights.keys()
    for name, value in weights.items():
        assert (found[name] - value).abs().max() <= 1e-12, name
    ours = ranks[0][1]
    assert ours.keys() == rows.keys()
    for name, number in rows.items():
        assert ours[name] == pytest.approx(number, rel=1e-6, abs=1e-12), name  # norms are read in float32
