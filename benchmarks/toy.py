"""The measured workload: a tiny network, its data, and hand-written loops; the other files of this folder use them.

One step of it takes about 100 microseconds, so that what a trainer adds is visible.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import loopwright as lw

Batch = tuple[Tensor, Tensor]
BATCH_SIZE = 8
FEATURES = 32


class Toy(lw.Module):
    """A network of two layers that notes the CPU time whenever one of its steps begins."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(FEATURES, 64), nn.ReLU(), nn.Linear(64, 1))
        self.began_s: list[float] = []

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        # All threads of the process: what a progress bar or logger does in the background counts, too.
        self.began_s.append(time.process_time())
        x, y = batch
        return F.mse_loss(self.net(x), y)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.began_s.append(time.process_time())
        x, y = batch
        F.mse_loss(self.net(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class LoggingToy(Toy):
    """The same, with three logged values per training step and one per validation step."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, prog_bar=True)
        self.log("twice", loss)
        self.log("thrice", loss)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.began_s.append(time.process_time())
        x, y = batch
        self.log("val_loss", F.mse_loss(self.net(x), y), batch_size=BATCH_SIZE)


def batches(count: int) -> list[Batch]:
    """Return ready-made batches in memory: reading them costs next to nothing."""
    random = torch.Generator().manual_seed(0)
    few = [
        (torch.randn(BATCH_SIZE, FEATURES, generator=random), torch.randn(BATCH_SIZE, 1, generator=random))
        for _ in range(min(count, 64))
    ]
    return [few[index % len(few)] for index in range(count)]


class Stream:
    """An iterable that is not a list: the trainer cannot know what it draws, and gives it separate random numbers."""

    def __init__(self, count: int) -> None:
        self.items = batches(count)

    def __iter__(self) -> Iterator[Batch]:
        yield from self.items


def shuffled_loader(count: int) -> DataLoader[tuple[Tensor, ...]]:
    """Return a DataLoader of `count` shuffled batches, as most programs have one."""
    random = torch.Generator().manual_seed(0)
    x = torch.randn(count * BATCH_SIZE, FEATURES, generator=random)
    y = torch.randn(count * BATCH_SIZE, 1, generator=random)
    return DataLoader(TensorDataset(x, y), batch_size=BATCH_SIZE, shuffle=True)


def make(kind: type[Toy]) -> Toy:
    """Return a toy that always has the same weights."""
    torch.manual_seed(0)
    return kind()


def train_by_hand(toy: Toy, data: Iterable[Any]) -> None:
    """Train with the usual loop: forward, zero, backward, step."""
    optimizer = toy.configure_optimizers()
    toy.train()
    for index, batch in enumerate(data):
        loss = toy.training_step(batch, index)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def accumulate_by_hand(toy: Toy, data: Iterable[Any]) -> None:
    """Accumulate four batches per step, and clip."""
    optimizer = toy.configure_optimizers()
    toy.train()
    for index, batch in enumerate(data):
        loss = toy.training_step(batch, index) / 4
        if index % 4 == 0:
            optimizer.zero_grad()
        loss.backward()
        if index % 4 == 3:
            nn.utils.clip_grad_norm_(toy.parameters(), 1.0)
            optimizer.step()


def validate_by_hand(toy: Toy, data: Iterable[Any]) -> None:
    """Evaluate every batch without gradients."""
    toy.eval()
    with torch.inference_mode():
        for index, batch in enumerate(data):
            toy.validation_step(batch, index)
