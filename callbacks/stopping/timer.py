"""`Timer`: a limit on the time of training, restarts included."""

from __future__ import annotations

import logging
import re
import time
from datetime import timedelta
from typing import TYPE_CHECKING

from ...errors import ConfigError
from ..base import AnyModule, Callback, from_rank_zero
from ..rank_zero import SharedDeadline

if TYPE_CHECKING:
    from ...protocols import AnyBatch, AnyOutput, StateDict
    from ...trainer import Trainer

_log = logging.getLogger(__name__)
_STAGES = ("train", "validate", "test")
_FORMAT = re.compile(r"(\d+):(\d\d):(\d\d):(\d\d)")


def _parse_duration(duration: str | timedelta | dict[str, float] | None) -> float | None:
    """Return seconds, or None for no limit."""
    if duration is None:
        return None
    if isinstance(duration, timedelta):
        return duration.total_seconds()
    if isinstance(duration, dict):
        try:
            return timedelta(**duration).total_seconds()
        except TypeError as error:
            raise ConfigError(
                f"Timer: duration={duration!r} has keys that are not units of time ({error}).",
                fix="use days, hours, minutes, seconds, such as {'hours': 1, 'minutes': 30}.",
            ) from None
    match = _FORMAT.fullmatch(duration.strip()) if isinstance(duration, str) else None
    if match is None:
        raise ConfigError(
            f"Timer: duration={duration!r} is not a duration: expected 'DD:HH:MM:SS', a timedelta or a dict.",
            fix="pass for example '00:12:00:00' for twelve hours.",
        )
    days, hours, minutes, seconds = (int(part) for part in match.groups())
    return timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds).total_seconds()


class Timer(Callback):
    """Measure the time of training, validation and test, and stop training after `duration`.

    The callback sets `trainer.should_stop`: all ranks stop at the same step boundary. The time of earlier runs counts
    when a run is resumed. Validation inside fit is part of the training time.

    Args:
        duration: Limit as "DD:HH:MM:SS", a timedelta, or a dict of timedelta's arguments; None for no limit.
        interval: When the clock is checked: "step" after each batch, "epoch" after each epoch.
        verbose: Whether reaching the limit is logged.

    Raises:
        ConfigError: The duration or the interval is invalid.
    """

    hears_every_step = True

    def __init__(
        self, duration: str | timedelta | dict[str, float] | None = None, interval: str = "step", verbose: bool = True
    ) -> None:
        super().__init__()
        self._lw_duration_s = _parse_duration(duration)
        interval = getattr(interval, "value", interval)
        if interval not in ("step", "epoch"):
            raise ConfigError(
                f"Timer: interval={interval!r}, expected 'step' or 'epoch'.", fix="choose one of the two."
            )
        self._interval = interval
        self._verbose = verbose
        self._lw_started: dict[str, float] = {}
        self._lw_ended: dict[str, float] = {}
        self._lw_offset_s = 0.0
        self._lw_deadline_s = float("inf")
        self._lw_shared: SharedDeadline | None = None

    def start_time(self, stage: str = "train") -> float | None:
        """Return the time at which the stage began, in seconds of the monotonic clock; None before that."""
        return self._lw_started.get(_checked(stage))

    def end_time(self, stage: str = "train") -> float | None:
        """Return the time at which the stage ended, in seconds of the monotonic clock; None before that."""
        return self._lw_ended.get(_checked(stage))

    def time_elapsed(self, stage: str = "train") -> float:
        """Return the seconds spent in the stage ("train", "validate", "test"), including training in earlier runs."""
        stage = _checked(stage)
        before = self._lw_offset_s if stage == "train" else 0.0
        if stage not in self._lw_started:
            return before
        return self._lw_ended.get(stage, time.monotonic()) - self._lw_started[stage] + before

    def time_remaining(self, stage: str = "train") -> float | None:
        """Return the remaining seconds, at least 0; None without a duration."""
        if self._lw_duration_s is None:
            return None
        return max(0.0, self._lw_duration_s - self.time_elapsed(stage))

    def on_fit_start(self, trainer: Trainer, pl_module: AnyModule) -> None:
        """Stop at once if no time is left for a resumed run."""
        self.stop_reason = None
        self._lw_offset_s = from_rank_zero(trainer, self.time_elapsed)
        self._lw_forget_training()
        if self._lw_duration_s is not None and self._lw_offset_s >= self._lw_duration_s:
            self._lw_stop(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: AnyModule) -> None:
        """Start the clock of training."""
        self._lw_start("train")
        if self._lw_duration_s is not None:
            self._lw_deadline_s = self._lw_started["train"] + self._lw_duration_s - self._lw_offset_s
            if trainer.ranks_answer and self._interval == "step":
                self._lw_shared = SharedDeadline(lambda: self._lw_deadline_s - time.monotonic())

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: AnyModule, outputs: AnyOutput, batch: AnyBatch, batch_idx: int
    ) -> None:
        """Check the clock; with several ranks, rank 0's clock at some steps (see `SharedDeadline`)."""
        if self._lw_shared is not None:
            if trainer.at_step_boundary and self._lw_shared.has_come(trainer.strategy, trainer.global_step):
                self._lw_shared, self._lw_deadline_s = None, float("inf")  # once is enough
                self._lw_stop(trainer)
        elif time.monotonic() >= self._lw_deadline_s and self._interval == "step" and not trainer.should_stop:
            self._lw_stop(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: AnyModule) -> None:
        """Check the clock, for interval="epoch"."""
        if self._lw_duration_s is None:
            return
        if from_rank_zero(trainer, lambda: time.monotonic() >= self._lw_deadline_s and not trainer.should_stop):
            self._lw_stop(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: AnyModule) -> None:
        """Stop the clock of training."""
        self._lw_ended["train"] = time.monotonic()
        self._lw_shared = None

    def on_validation_start(self, trainer: Trainer, pl_module: AnyModule) -> None:
        """Start the clock of validation."""
        self._lw_start("validate")

    def on_validation_end(self, trainer: Trainer, pl_module: AnyModule) -> None:
        """Stop the clock of validation."""
        self._lw_ended["validate"] = time.monotonic()

    def on_test_start(self, trainer: Trainer, pl_module: AnyModule) -> None:
        """Start the clock of the test."""
        self._lw_start("test")

    def on_test_end(self, trainer: Trainer, pl_module: AnyModule) -> None:
        """Stop the clock of the test."""
        self._lw_ended["test"] = time.monotonic()

    def forget_run(self) -> None:
        """Reset the times."""
        self._lw_started, self._lw_ended, self._lw_offset_s = {}, {}, 0.0

    def state_dict(self) -> StateDict:
        """Return the seconds spent per stage."""
        return {"time_elapsed": {stage: self.time_elapsed(stage) for stage in _STAGES}}

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Continue with the training time of the earlier run."""
        self._lw_offset_s = float(state_dict.get("time_elapsed", {}).get("train", 0.0))
        self._lw_forget_training()

    def _lw_forget_training(self) -> None:
        self._lw_started.pop("train", None)
        self._lw_ended.pop("train", None)

    def _lw_start(self, stage: str) -> None:
        self._lw_started[stage] = time.monotonic()
        self._lw_ended.pop(stage, None)

    def _lw_stop(self, trainer: Trainer) -> None:
        trainer.should_stop = True
        self.stop_reason = f"the time limit of {timedelta(seconds=int(self._lw_duration_s or 0))} is reached"
        if self._verbose and trainer.is_global_zero:
            elapsed = timedelta(seconds=int(self.time_elapsed()))
            _log.info("Timer: the time limit is reached after %s of training; stopping at the next step.", elapsed)


def _checked(stage: str) -> str:
    stage = getattr(stage, "value", stage)
    if stage not in _STAGES:
        raise ConfigError(f"Timer: stage={stage!r} is not timed, expected one of {list(_STAGES)}.", fix="choose one.")
    return stage
