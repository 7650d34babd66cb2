"""The time interval between checkpoints."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING

from ..rank_zero import SharedDeadline

if TYPE_CHECKING:
    from ...trainer import Trainer


class TimeInterval:
    """The time between two checkpoints.

    Args:
        length: Length of the interval.
    """

    def __init__(self, length: timedelta) -> None:
        self.length_s = length.total_seconds()
        self._began_s = 0.0
        self._deadline: SharedDeadline | None = None

    def begin(self, trainer: Trainer) -> None:
        """Start the next interval; on every rank."""
        self._began_s = time.monotonic()
        if trainer.ranks_answer:
            ends_s = self._began_s + self.length_s
            self._deadline = SharedDeadline(lambda: ends_s - time.monotonic())

    def is_over(self, trainer: Trainer) -> bool:
        """Whether the interval has ended, by rank 0's clock; on every rank, at the end of a step."""
        if self._deadline is not None:
            return self._deadline.has_come(trainer.strategy, trainer.global_step)
        return time.monotonic() - self._began_s >= self.length_s
