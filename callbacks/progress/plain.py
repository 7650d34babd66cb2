"""Progress as lines of text, for output that is not a terminal: a log file, CI, a pipe."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING

from .base import format_metrics

if TYPE_CHECKING:
    from ...trainer import Trainer


class PlainLines:
    """Write lines at intervals.

    Args:
        write: Takes a text that ends with a newline.

    A line of training: "Epoch 2/9 | step 1200/5000 | 12.3 it/s | train_loss=0.432 | ETA 0:03:10". Steps are optimizer
    steps, it/s are micro-batches per second since the last line without the time of validations, and the remaining
    time is an estimate to the end of the run by its pace so far. Epochs are numbered from 0.
    """

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._start_s = self._line_s = time.monotonic()
        self._start_step = 0
        self._line_batches = 0
        self._paused_s = 0.0

    def start(self, trainer: Trainer) -> None:
        """Begin to measure: a run of training begins."""
        self._start_s = self._line_s = time.monotonic()
        self._start_step = trainer.global_step
        self._line_batches = trainer.progress.total_batches
        self._paused_s = 0.0

    def pause(self, seconds: float) -> None:
        """Leave these seconds out of the pace since the last line: a validation took them."""
        self._paused_s += seconds

    def training(self, trainer: Trainer, metrics: dict[str, float | int | str]) -> None:
        """Write the line of training."""
        now, batches = time.monotonic(), trainer.progress.total_batches
        limit = trainer.fit_loop.epoch_limit
        parts = [f"Epoch {_of(trainer.current_epoch, limit - 1 if limit > 0 else None)}"]
        total = total_steps(trainer)
        parts.append(f"step {_of(trainer.global_step, total)}")
        seconds = now - self._line_s - self._paused_s
        if batches > self._line_batches and seconds > 0:
            parts.append(f"{(batches - self._line_batches) / seconds:.3g} it/s")
        parts += format_metrics(metrics)
        done = trainer.global_step - self._start_step
        if total is not None and done > 0:
            left_s = (now - self._start_s) / done * max(0, total - trainer.global_step)
            parts.append(f"ETA {timedelta(seconds=round(left_s))}")
        self._line_s, self._line_batches, self._paused_s = now, batches, 0.0
        self._write(" | ".join(parts) + "\n")

    def evaluation(
        self, description: str, done: int, total: int | float, metrics: dict[str, float | int | str]
    ) -> None:
        """Write the line of a validation, test or prediction."""
        known = None if math.isinf(total) else int(total)
        self._write(" | ".join([description, f"batch {_of(done, known)}", *format_metrics(metrics)]) + "\n")


def _of(done: int, total: int | None) -> str:
    return f"{done}" if total is None or total < 0 else f"{done}/{total}"


def total_steps(trainer: Trainer) -> int | None:
    """Return the optimizer steps at which the run will end, as far as that is known."""
    total = trainer.estimated_stepping_batches
    return None if math.isinf(total) else int(total)
