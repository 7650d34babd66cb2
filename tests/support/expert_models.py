"""A small model with layers of experts, its data, and a handwritten loop that trains it on one process."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import loopwright as lw

__all__ = ["SAMPLES", "Mixture", "data", "loader"]

# Any in this file: batches and arguments of layers.

SAMPLES = 40


class Block(nn.Module):
    """A norm and a layer of experts, with a residual connection."""

    def __init__(self, num_experts: int, **options: Any) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.moe = lw.Experts(6, 8, num_experts, **options)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.moe(self.norm(x))
        return result


class Mixture(lw.Module):
    """A stem, two blocks with experts and a head; tokens have the shape (batch, 3, 6)."""

    def __init__(self, num_experts: int = 4, balance: float = 0.0, **options: Any) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(Block(num_experts, **options) for _ in range(2))
        self.head = nn.Linear(6, 6)
        self.balance = balance
        self.losses: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).tanh()
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = nn.functional.mse_loss(self(x), y)
        for block in self.blocks:
            loss = loss + self.balance * block.moe.balance_loss
        self.log("loss", loss, on_step=False, on_epoch=True)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", nn.functional.mse_loss(self(x), y), batch_size=len(x))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.02)


def data(samples: int = SAMPLES) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(samples, 3, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(x, x.flip(2).sin())


def loader(batch_size: int, samples: int = SAMPLES) -> DataLoader[Any]:
    return DataLoader(data(samples), batch_size=batch_size)
