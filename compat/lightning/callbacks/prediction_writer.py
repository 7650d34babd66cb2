"""`BasePredictionWriter` whose `interval` is a `WriteInterval`, which subclasses ask."""

from __future__ import annotations

from typing import Literal

from .... import callbacks
from ..enums import WriteInterval

__all__ = ["BasePredictionWriter"]


class BasePredictionWriter(callbacks.BasePredictionWriter):
    """Loopwright's writer under Lightning's name.

    Args:
        write_interval: "batch", "epoch", or "batch_and_epoch": when it writes.
    """

    def __init__(self, write_interval: Literal["batch", "epoch", "batch_and_epoch"] = "batch") -> None:
        super().__init__(write_interval)
        self.interval = WriteInterval(self.interval)
