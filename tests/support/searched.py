"""Modules and data whose learning rate and batch size can be searched for, for tests of the tuner."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader
from toys import Net, pairs

import loopwright as lw

__all__ = ["BATCH", "Data", "Searched"]

BATCH = 20  # samples that fit into the memory of these tests


class Searched(Net):
    """A Net with `lr` and `batch_size`, which runs out of memory above `BATCH` samples.

    Args:
        lr: Learning rate.
        batch_size: Samples of a batch.
        count: Samples in all.
        hyper: Keep both as hyperparameters only.
    """

    def __init__(self, lr: float = 0.5, batch_size: int = 4, count: int = 64, hyper: bool = False) -> None:
        super().__init__(dropout=0.1)
        if hyper:
            self.save_hyperparameters("lr", "batch_size")
        else:
            self.lr, self.batch_size = lr, batch_size
        self.count = count
        self.data = pairs(count)
        self.data.generator = torch.Generator().manual_seed(3)  # one that shuffling draws from
        self.sizes: list[int] = []
        self.rates: list[float] = []

    def value(self, name: str) -> Any:
        return getattr(self, name) if hasattr(self, name) else self.hparams[name]

    def _check(self, batch: Any) -> None:
        self.sizes.append(len(batch[0]))
        if len(batch[0]) > BATCH:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self._check(batch)
        self.rates.append(float(self.optimizers().param_groups[0]["lr"]))
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._check(batch)
        self.log("val_loss", self.loss(batch))

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        self._check(batch)
        return self.net(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.value("lr"), momentum=0.9)

    def train_dataloader(self) -> Any:
        return DataLoader(
            self.data, batch_size=self.value("batch_size"), shuffle=True, generator=self.data.generator
        )  # fmt: skip

    def val_dataloader(self) -> Any:
        return DataLoader(self.data, batch_size=self.value("batch_size"))

    predict_dataloader = val_dataloader


class Data(lw.DataModule):
    """A data module that counts how often it is set up."""

    def __init__(self, batch_size: int = 4, count: int = 64) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.count = count
        self.setups = 0

    def setup(self, stage: str) -> None:
        self.setups += 1

    def train_dataloader(self) -> Any:
        return DataLoader(pairs(self.count), batch_size=self.batch_size)
