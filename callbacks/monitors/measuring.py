"""Parts that monitors share: log steps, a clock with pauses, counts of samples, and the requirement of a logger."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from ...errors import ConfigError
from ...fabric.peak_flops import synchronize

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ...protocols import AnyBatch
    from ...trainer.trainer import Trainer
    from ..base import Callback

__all__ = ["Clock", "Counts", "LogSteps", "is_evaluation_due", "require_logger"]


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


def is_evaluation_due(trainer: Trainer) -> bool:
    """Return whether the present batch of an evaluation is to be logged; False without `log_every_n_steps`."""
    every = trainer.log_every_n_steps
    return bool(every) and (trainer.progress.eval_batches + 1) % every == 0


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


class Counts:
    """Batches, samples and items that this rank has read since a start, and the time meanwhile.

    Args:
        samples_of: Function that returns the number of samples of a batch; None is taken as 0.
        items_of: Function that returns the number of items (such as tokens) of a batch: an int, or a tensor of shape
            (), which stays on its device. None: not counted.

    Attributes:
        clock: Runs since the start.
        batches: Number of batches.
        samples: Number of samples.
        items: Number of items.
    """

    def __init__(
        self, samples_of: Callable[[object], int | None], items_of: Callable[[object], int | Tensor] | None = None
    ) -> None:
        self.clock = Clock()
        self.batches = self.samples = 0
        self.items: int | Tensor = 0
        self._samples_of, self._items_of = samples_of, items_of

    def start(self) -> None:
        """Count from 0, from now on."""
        self.batches = self.samples = self.items = 0
        self.clock.start()

    def add(self, batch: AnyBatch) -> int:
        """Count a batch; return its number of samples."""
        size = self._samples_of(batch) or 0
        self.batches += 1
        self.samples += size
        if self._items_of is not None:
            self.items = self.items + self._items_of(batch)
        return size

    def seconds(self, device: torch.device) -> float:
        """Wait for the device, and return the seconds since the start, without pauses."""
        synchronize(device)
        return self.clock.running_s()
