"""Runs on disk for the tests of this folder, written by the loggers themselves."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

import loopwright as lw


class Line(lw.Module):
    """A line through points; its loss falls."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = (self.layer(batch[0]) - 3 * batch[0]).square().mean()
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.log("val_loss", (self.layer(batch[0]) - 3 * batch[0]).square().mean(), batch_size=len(batch[0]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.hparams["lr"])


def fit(
    folder: Path,
    *,
    lr: float = 0.1,
    epochs: int = 3,
    version: int | None = None,
    ckpt_path: str | None = None,
    more_loggers: Sequence[lw.Logger] = (),
) -> lw.Trainer:
    """Train for 8 steps an epoch with CSV and TensorBoard loggers in folders of their own, as `make train` does."""
    lw.seed_everything(1, verbose=False)
    loader = DataLoader(TensorDataset(torch.linspace(-1, 1, 32)[:, None]), batch_size=4, shuffle=True)
    trainer = lw.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        log_every_n_steps=2,
        logger=[
            lw.CSVLogger(folder, name="csv", version=version),
            lw.TensorBoardLogger(folder, name="tensorboard", version=version, default_hp_metric=False),
            *more_loggers,
        ],
        callbacks=[
            lw.ModelCheckpoint(folder / "checkpoints", "{step}-{val_loss:.3f}", monitor="val_loss", save_last=True),
            lw.LearningRateMonitor(),
        ],
        default_root_dir=folder,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Line(lr), loader, loader, ckpt_path=ckpt_path)
    return trainer


def write_csv(folder: Path, columns: dict[str, list[float]], *, every: int = 1) -> Path:
    """Write a metrics.csv with the logger itself."""
    logger = lw.CSVLogger(folder, name=None, version="")
    for row, values in enumerate(zip(*columns.values(), strict=True)):
        logger.log_metrics(dict(zip(columns, values, strict=True)), step=row * every)
    logger.save()
    return folder


def write_lines(folder: Path, rows: Iterable[dict[str, object]]) -> Path:
    """Append lines to metrics.jsonl, in the format of JSONLinesLogger."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "metrics.jsonl", "a", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row) + "\n")
    return folder


def falling(count: int, *, begin: float = 4.0) -> list[float]:
    """Return a curve that falls and shakes a little, always the same."""
    return [begin * math.exp(-step / count * 3) + 0.2 * math.sin(step * 12.9898) ** 2 for step in range(count)]
