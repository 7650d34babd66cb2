"""Parts that monitors share: log steps, a clock with pauses, and the requirement of a logger."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ...errors import ConfigError

if TYPE_CHECKING:
    from ...trainer.trainer import Trainer
    from ..base import Callback

__all__ = ["Clock", "LogSteps", "require_logger"]


def require_logger(trainer: Trainer, callback: Callback) -> None:
    """Refuse a run without a logger.

    Raises:
        ConfigError: The trainer has no logger, and this is not a `fast_dev_run`.
    """
    if not trainer.loggers and not trainer.fast_dev_run:
        raise ConfigError(
            f"{type(callback).__name__} has no logger to write to.",
            fix="pass Trainer(logger=...), or remove the callback.",
        )


class LogSteps:
    """The training steps that a callback logs. A skipped step has the number of the one before and is left out."""

    def __init__(self) -> None:
        self._step = -1

    def start(self, trainer: Trainer) -> None:
        """Begin after the current step: a resumed run logged it already."""
        self._step = trainer.global_step

    def is_due(self, trainer: Trainer, every_n_steps: int) -> bool:
        """Whether the current step is to be logged; once per step, at the end of its last micro-batch."""
        step = trainer.global_step
        if not trainer.at_step_boundary or not every_n_steps or step % every_n_steps or step == self._step:
            return False
        self._step = step
        return True


class Clock:
    """Seconds since a start, with and without pauses."""

    def __init__(self) -> None:
        self._began_s = self._paused_s = 0.0
        self._paused_at_s: float | None = None

    def start(self, elapsed_s: float = 0.0) -> None:
        """Start, as if this many seconds had passed already."""
        self._began_s, self._paused_s, self._paused_at_s = time.perf_counter() - elapsed_s, 0.0, None

    def pause(self) -> None:
        """Stop counting."""
        self._paused_at_s = time.perf_counter()

    def resume(self) -> None:
        """Continue counting, if the clock is paused."""
        if self._paused_at_s is not None:
            self._paused_s += time.perf_counter() - self._paused_at_s
            self._paused_at_s = None

    def running_s(self) -> float:
        """Return the seconds since the start, without pauses."""
        now_s = time.perf_counter() if self._paused_at_s is None else self._paused_at_s
        return now_s - self._began_s - self._paused_s

    def wall_s(self) -> float:
        """Return the seconds since the start, pauses included."""
        return time.perf_counter() - self._began_s
