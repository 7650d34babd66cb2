"""A module whose layers but the last can be converted to float8 and MXFP8, and its batches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import loopwright as lw

__all__ = ["Net", "batches"]


class Net(lw.Module):
    """Learns to return the first three values; its head has a size that is no multiple of 16."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
        self.head = nn.Linear(32, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return (self.head(self.body(batch)) - batch[:, :3]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def batches(rows: int) -> list[Tensor]:
    """Return eight batches of so many rows of 32 values; 24 rows are no multiple of a block of MXFP8."""
    return list(torch.randn(8, rows, 32, generator=torch.Generator().manual_seed(1)))
