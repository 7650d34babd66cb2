"""`EarlyStopping`: stops training when a metric no longer improves."""

from __future__ import annotations

import logging
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...errors import ConfigError, MissingMetric, nearest
from ...messages import counted
from ..base import AnyModule, Callback

if TYPE_CHECKING:
    from ...protocols import StateDict
    from ...trainer import Trainer

_log = logging.getLogger(__name__)


class EarlyStoppingReason(IntEnum):
    """Reason why the last check requested a stop."""

    NOT_STOPPED = 0
    STOPPING_THRESHOLD = 1
    DIVERGENCE_THRESHOLD = 2
    PATIENCE_EXHAUSTED = 3
    NON_FINITE_METRIC = 4


def _as_judged(trainer: Trainer, should_stop: bool) -> bool:
    return should_stop  # all ranks have judged the same value


@dataclass(frozen=True, slots=True)
class StopRules:
    """The replaceable functions of `EarlyStopping`; a layer for another library assigns to `callback.rules`.

    Attributes:
        judges_again: Whether a value that was checked before is checked again.
        agree: Returns whether to stop, given this rank's decision; called on every rank.
    """

    judges_again: bool = False
    agree: Callable[[Trainer, bool], bool] = _as_judged


class EarlyStopping(Callback):
    """Stop training when the monitored metric has not improved for `patience` checks.

    Each new value of the metric is checked once, at the end of training epochs or of validations. Training continues
    until `Trainer(min_epochs=, min_steps=)` are reached. With several ranks, the value is reduced over all ranks.

    Args:
        monitor: Name of the logged metric.
        min_delta: Smallest change that counts as an improvement, in the metric's unit; not negative.
        patience: Number of checks without improvement before training stops.
        verbose: Whether each improvement and the stop are logged when they are found. The last line of the fit has
            the reason of a stop in any case.
        mode: "min" if smaller is better, else "max".
        strict: Whether a missing metric is an error; otherwise it is logged once.
        check_finite: Whether training stops when the metric is NaN or infinite.
        stopping_threshold: Training stops when the metric is better than this value; None for no threshold.
        divergence_threshold: Training stops when the metric is worse than this value; None for no threshold.
        check_on_train_epoch_end: Whether to check at the end of training epochs, else of validations. None: at the end
            of epochs if each ends with a validation or if validation is disabled.
        log_rank_zero_only: Whether only rank zero writes log lines.

    Attributes:
        wait_count: Number of checks since the last improvement.
        best_score: Best value so far: shape (), float64, on the CPU.
        stopped_epoch: Epoch (from 0) of the stop request; 0 before.
        stopping_reason: Reason of the stop request.
        stopping_reason_message: The reason as a sentence.
        rules: Functions that a layer for another library can replace; see `StopRules`.

    Raises:
        ConfigError: An argument is invalid.
        MissingMetric: In training: no metric of this name was logged.
    """

    runs_last = True
    rules = StopRules()
    mode_dict: dict[str, Callable[[float, float], bool]] = {"min": operator.lt, "max": operator.gt}
    order_dict = {"min": "<", "max": ">"}

    def __init__(
        self,
        monitor: str,
        min_delta: float = 0.0,
        patience: int = 3,
        verbose: bool = False,
        mode: str = "min",
        strict: bool = True,
        check_finite: bool = True,
        stopping_threshold: float | None = None,
        divergence_threshold: float | None = None,
        check_on_train_epoch_end: bool | None = None,
        log_rank_zero_only: bool = False,
    ) -> None:
        super().__init__()
        _check_arguments(monitor=monitor, min_delta=min_delta, patience=patience, mode=mode)
        self.monitor = monitor
        self.min_delta = -min_delta if mode == "min" else min_delta
        self.patience = patience
        self.verbose = verbose
        self.mode = mode
        self.strict = strict
        self.check_finite = check_finite
        self.stopping_threshold = stopping_threshold
        self.divergence_threshold = divergence_threshold
        self.log_rank_zero_only = log_rank_zero_only
        self._check_on_train_epoch_end = check_on_train_epoch_end
        self._lw_at_epoch_end = bool(check_on_train_epoch_end)

        self.forget_run()

    def forget_run(self) -> None:
        """Reset the counters and the best score."""
        self.wait_count = 0
        self.stopped_epoch = 0
        self.best_score = torch.tensor(math.inf if self.mode == "min" else -math.inf, dtype=torch.float64)
        self.stopping_reason = EarlyStoppingReason.NOT_STOPPED
        self.stopping_reason_message: str | None = None
        self._lw_checked_step = -1
        self._lw_was_loaded = False
        self._lw_has_warned = False

    @property
    def state_key(self) -> str:
        """Key of the state in a checkpoint: monitor and mode distinguish instances."""
        return self._generate_state_key(monitor=self.monitor, mode=self.mode)

    @property
    def monitor_op(self) -> Callable[[float, float], bool]:
        """Function `(a, b) -> bool`: whether `a` is better than `b` in this mode."""
        return self.mode_dict[self.mode]

    def on_train_start(self, trainer: Trainer, pl_module: AnyModule) -> None:
        """Decide when to check; a resumed run that was stopped stops again."""
        at_epoch_end = self._check_on_train_epoch_end
        if at_epoch_end is None:
            interval = 1.0 if trainer.val_check_interval is None else trainer.val_check_interval
            each_epoch = isinstance(interval, float) and interval == 1.0 and trainer.check_val_every_n_epoch == 1
            at_epoch_end = each_epoch or not trainer.enable_validation
        self._lw_at_epoch_end = at_epoch_end
        was_loaded, self._lw_was_loaded = self._lw_was_loaded, False
        has_patience = (
            self.stopping_reason == EarlyStoppingReason.PATIENCE_EXHAUSTED and self.wait_count < self.patience
        )
        if not was_loaded or has_patience:
            self.stopping_reason, self.stopping_reason_message = EarlyStoppingReason.NOT_STOPPED, None
        elif self.stopping_reason != EarlyStoppingReason.NOT_STOPPED:
            self._lw_report(trainer, "EarlyStopping: this run was stopped: %s", self.stopping_reason_message)
            trainer.should_stop = True

    @property
    def stop_reason(self) -> str | None:  # type: ignore[override]  # read only
        """Reason why this callback stopped training; None if it did not."""
        is_stopped = self.stopping_reason != EarlyStoppingReason.NOT_STOPPED
        return self.stopping_reason_message if is_stopped else None

    def on_train_epoch_end(self, trainer: Trainer, pl_module: AnyModule) -> None:
        """Check, if checks follow epochs."""
        if self._lw_at_epoch_end:
            self._run_early_stopping_check(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: AnyModule) -> None:
        """Check, if checks follow validations."""
        if not self._lw_at_epoch_end:
            self._run_early_stopping_check(trainer)

    def state_dict(self) -> StateDict:
        """Return counters, best score and reason."""
        return {
            "wait_count": self.wait_count,
            "stopped_epoch": self.stopped_epoch,
            "best_score": self.best_score,
            "patience": self.patience,
            "stopping_reason": int(self.stopping_reason),
            "stopping_reason_message": self.stopping_reason_message,
            "checked_step": self._lw_checked_step,
        }

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Restore the state, except the patience, which can thus be increased for a resumed run."""
        self.wait_count = int(state_dict["wait_count"])
        self.stopped_epoch = int(state_dict["stopped_epoch"])
        self.best_score = torch.as_tensor(state_dict["best_score"], dtype=torch.float64, device="cpu")
        self.stopping_reason = EarlyStoppingReason(int(state_dict.get("stopping_reason", 0)))
        self.stopping_reason_message = state_dict.get("stopping_reason_message")
        self._lw_checked_step = int(state_dict.get("checked_step", -1))
        self._lw_was_loaded = True
        if state_dict.get("patience", self.patience) != self.patience:
            _log.info("EarlyStopping: patience was %s and is now %s.", state_dict["patience"], self.patience)

    # Subclasses of libraries override the next three, under these names.

    def _should_skip_check(self, trainer: Trainer) -> bool:
        return trainer.state.fn != "fit" or trainer.sanity_checking or bool(trainer.fast_dev_run)

    def _run_early_stopping_check(self, trainer: Trainer) -> None:
        """Judge the latest value, and stop the training if that says so."""
        if self._should_skip_check(trainer):
            return
        trainer.synchronize_metrics(self.monitor)  # the value of a step is each rank's own until then
        value, step = self._lw_read(trainer)
        if value is None:
            return
        if step is not None and not self.rules.judges_again:
            if step == self._lw_checked_step:
                return
            self._lw_checked_step = step
        should_stop, message = self._evaluate_stopping_criteria(value)
        should_stop = self.rules.agree(trainer, should_stop)
        if should_stop:
            self.stopping_reason_message = message
            trainer.should_stop = True
            self.stopped_epoch = trainer.current_epoch
        if message and self.verbose:  # the line at the end of the fit has the reason of a stop
            self._lw_report(trainer, "EarlyStopping: %s", message)

    def _evaluate_stopping_criteria(self, current: Tensor) -> tuple[bool, str | None]:
        """Return whether to stop, and what to report; sets `stopping_reason` if so."""
        reason, message = self._lw_judge(float(current))
        should_stop = reason != EarlyStoppingReason.NOT_STOPPED
        if should_stop:
            # Kept also if a later check is better (min_epochs may hold training): the request stands, also on resume.
            self.stopping_reason = reason
        return should_stop, message

    def _lw_read(self, trainer: Trainer) -> tuple[Tensor | None, int | None]:
        """Return the metric's value and the step that it belongs to; None where it was not logged."""
        value = trainer.callback_metrics.get(self.monitor)
        if value is None:
            self._lw_miss(trainer)
            return None, None
        # The CPU waits for the device; we are at the end of an epoch or a validation, where that is paid already.
        return torch.as_tensor(value, device="cpu").detach().squeeze(), trainer.metric_step(self.monitor)

    def _lw_judge(self, current: float) -> tuple[EarlyStoppingReason, str | None]:
        """Judge this value, and update the best score and the count."""
        name, best, is_better = f"{self.monitor} = {current:.6g}", float(self.best_score), self.monitor_op
        if self.check_finite and not math.isfinite(current):
            return EarlyStoppingReason.NON_FINITE_METRIC, f"{name} is not finite (best was {best:.6g})."
        if self.stopping_threshold is not None and is_better(current, self.stopping_threshold):
            return (
                EarlyStoppingReason.STOPPING_THRESHOLD,
                f"{name} reached stopping_threshold ({self.order_dict[self.mode]} {self.stopping_threshold}).",
            )
        if self.divergence_threshold is not None and is_better(-current, -self.divergence_threshold):
            return (
                EarlyStoppingReason.DIVERGENCE_THRESHOLD,
                f"{name} is worse than divergence_threshold = {self.divergence_threshold}.",
            )
        if is_better(current - self.min_delta, best):
            self.best_score = torch.tensor(current, dtype=torch.float64)
            self.wait_count = 0
            return EarlyStoppingReason.NOT_STOPPED, f"{name} is the new best (was {best:.6g})."
        self.wait_count += 1
        if self.wait_count >= self.patience:
            enough = f" by more than {abs(self.min_delta)}" if self.min_delta else ""
            return (
                EarlyStoppingReason.PATIENCE_EXHAUSTED,
                f"{name} did not improve on {best:.6g}{enough} in {counted(self.wait_count, 'check')}.",
            )
        return EarlyStoppingReason.NOT_STOPPED, None

    def _lw_miss(self, trainer: Trainer) -> None:
        known = sorted(trainer.callback_metrics)
        if self.strict:
            raise MissingMetric(
                f"EarlyStopping(monitor={self.monitor!r}): no metric of this name was logged"
                f"{nearest(self.monitor, known)}; there are {known}.",
                fix=f"log it with self.log({self.monitor!r}, ...), monitor one of those, or pass strict=False.",
            )
        if not self._lw_has_warned:
            self._lw_has_warned = True
            _log.warning("EarlyStopping: no metric %r was logged; there are %s.", self.monitor, known)

    def _lw_report(self, trainer: Trainer, text: str, *args: object) -> None:
        if trainer.is_global_zero or not self.log_rank_zero_only:
            _log.info(text, *args)


def _check_arguments(*, monitor: str, min_delta: float, patience: int, mode: str) -> None:
    problems = []
    if not isinstance(monitor, str) or not monitor:
        problems.append(f"monitor={monitor!r} (expected the name of a metric)")
    if mode not in ("min", "max"):
        problems.append(f"mode={mode!r} (expected 'min' or 'max')")
    if not isinstance(patience, int) or patience < 0:
        problems.append(f"patience={patience!r} (expected an integer >= 0)")
    if not min_delta >= 0:
        problems.append(f"min_delta={min_delta!r} (expected a number >= 0)")
    if problems:
        raise ConfigError(f"EarlyStopping: {', '.join(problems)}.", fix="correct these arguments.")
