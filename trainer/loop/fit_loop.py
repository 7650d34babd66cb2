"""The fit loop: epochs, windows, and what falls due between them.

It has no state of its own: everything it needs to continue is in `Progress`, so resuming is entering the loop.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from ...data.rng import capture_rng, restore_rng
from ...errors import ConfigError, DataError
from ..run import FitRun
from .window import train_window

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from ..view import TrainerView

logger = logging.getLogger(__name__)


class Rewind(Exception):
    """Leaves an epoch between two windows: training continues where a restored state was taken.

    Args:
        restore: Restores the state: progress, and where the data were. Returns a function that restores the random
            number generators when the data are open, or None.
    """

    def __init__(self, restore: Callable[[], Callable[[], None] | None]) -> None:
        super().__init__()
        self.restore = restore


class FitLoop:
    """Trains until a limit is reached.

    Args:
        trainer: Its limits and intervals apply.

    Attributes:
        max_epochs, min_epochs, max_steps, min_steps: The limits; may be changed between two fits.
        is_used_up: Whether `max_samples` or `max_tokens` is reached; the same on all ranks.
        plan_counts_steps: Whether the plan of a step compares its own count with `max_steps`, and sets `is_used_up`.
        seams: The functions that a layer for another library exchanges.
        next_validation: Count of batches at which the next validation is due.
        look_at: Batch of this epoch from which on a validation may be due.
    """

    def __init__(
        self,
        trainer: TrainerView,
        *,
        max_epochs: int | None,
        min_epochs: int | None,
        max_steps: int,
        min_steps: int | None,
        seams: LoopSeams | None = None,
    ) -> None:
        self._trainer = trainer
        self.seams = LoopSeams() if seams is None else seams
        self.max_epochs = max_epochs
        self.min_epochs = min_epochs
        self.max_steps = max_steps
        self.min_steps = min_steps
        self.is_used_up = False
        self.plan_counts_steps = False
        self.next_validation: int | float = math.inf
        self.look_at: int | float = 0
        self._validation_clock_s = 0.0
        self._asked_at = -1
        # Of an epoch that is continued on another number of ranks: its batches then, and how many it has more in all.
        self._moved = (0, 0)
        self._rank_zero_said = False

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_trainer": self._trainer._lw_itself}

    # --- limits ----------------------------------------------------------------------------------------------------

    @property
    def epoch_limit(self) -> int:
        """`max_epochs` with its default: unbounded where steps, samples, tokens or time are limited, else 1000."""
        if self.max_epochs is not None:
            return self.max_epochs
        trainer = self._trainer
        is_limited = self.max_steps != -1 or trainer.max_samples is not None or trainer.max_tokens is not None
        return -1 if is_limited or self.has_time_limit else 1000

    @property
    def has_time_limit(self) -> bool:
        """Whether a Timer limits training."""
        from ...callbacks import Timer

        return any(isinstance(callback, Timer) for callback in self._trainer.callbacks)

    @property
    def data_limits(self) -> dict[str, int]:
        """The limits that count data: `max_samples` and `max_tokens`, as far as given."""
        limits = {"max_samples": self._trainer.max_samples, "max_tokens": self._trainer.max_tokens}
        return {name: value for name, value in limits.items() if value is not None}

    @property
    def may_stop(self) -> bool:
        """Whether `should_stop` counts now: min_epochs and min_steps are both met."""
        progress = self._trainer.progress
        min_epochs = self.min_epochs
        if min_epochs is None and self.min_steps:
            min_epochs = 1
        return progress.epochs >= (min_epochs or 0) and progress.global_step >= (self.min_steps or 0)

    @property
    def is_at_limit(self) -> bool:
        """Whether epochs, steps, samples or tokens are used up."""
        progress = self._trainer.progress
        if self._trainer.limit_train_batches == 0 or self.is_used_up:
            return True
        if self.max_steps != -1 and progress.global_step >= self.max_steps:
            return True
        return self.epoch_limit != -1 and progress.epochs >= self.epoch_limit

    @property
    def is_done(self) -> bool:
        """Whether no further step is to be taken."""
        return self.is_at_limit or self.stops_here

    @property
    def stops_here(self) -> bool:
        """Whether `should_stop` ends the run now. On several ranks it is what all of them agreed on.

        Ranks of a replica group may agree on a place within a round, which is completed.
        """
        run = self._trainer.present_run()
        stop_points = None if run is None else run.stop_points
        asked = self._trainer.should_stop if stop_points is None else stop_points.is_to_stop
        groups = getattr(run, "groups", None)
        return asked and self.may_stop and not (groups is not None and groups.is_within_round)

    def accumulation_for_epoch(self, epoch: int) -> int:
        """Return the micro-batches of a window in this epoch."""
        trainer = self._trainer
        scheduler = trainer.accumulation_scheduler
        return trainer.accumulate_grad_batches if scheduler is None else scheduler.get_accumulate_grad_batches(epoch)

    # --- the loop --------------------------------------------------------------------------------------------------

    def run(self, run: FitRun, restore: Callable[[], None] | None) -> None:
        """Train.

        Args:
            run: The run.
            restore: Restores the random number generators of a checkpoint; called last before training continues.
        """
        self._check_windows(run)
        self._validation_clock_s = time.monotonic() - run.progress.validated_s
        self._asked_at, self._moved = -1, (0, 0)
        exchanging = [one for one in run.optimizers if hasattr(one, "train") and hasattr(one, "eval")]
        if exchanging:
            from ..checkpointing.evaluation_weights import EvaluationWeights

            run.evaluation_weights = EvaluationWeights(exchanging)
            run.evaluation_weights.train()
        run.lifecycle.on_train_start()
        timeline = self._trainer.timeline
        timeline.begin(run, rest=_rest_of_step(run))
        self._return_to_data(run, restore)
        stop_points = run.stop_points
        if stop_points is not None:
            stop_points.begin_phase(may_stop=self.may_stop and not self.is_at_limit)
        while not self.is_done or self._has_epoch_to_close(run):
            try:
                self.run_epoch(run)
            except Rewind as rewind:
                run.lifecycle.leave_events()
                if timeline.is_open:
                    timeline.drop(run)
                self._asked_at, self._moved = -1, (0, 0)
                self._return_to_data(run, rewind.restore())
            if stop_points is not None:
                stop_points.begin_phase(may_stop=self.may_stop and not self.is_at_limit)
        self._trainer.wait_for_save()  # listeners to the end may read the files
        timeline.end(run)
        run.lifecycle.on_train_end()
        if run.evaluation_weights is not None:
            run.evaluation_weights.evaluate()  # for users of the module after training

    def _return_to_data(self, run: FitRun, restore_rng: Callable[[], None] | None) -> None:
        """Continue where a restored state was taken: data, random number generators, and the event that was handled."""
        if run.progress.epoch_open:
            self._reopen_epoch(run)
        if restore_rng is not None:
            restore_rng()
        if run.unfinished:
            from ..checkpointing.unfinished import finish

            finish(self._trainer, run)

    def _reopen_epoch(self, run: FitRun) -> None:
        """Go back to where the data of an open epoch were; the random number generators stay as they are."""
        rng, planned = capture_rng(), run.stream.num_batches
        if run.stream.knows_position:
            run.stream.reopen()
        else:
            self._skip_batches(run)
        restore_rng(rng)
        run.progress.move_to(run.stream.position)
        now = run.stream.num_batches
        if math.isfinite(now) and math.isfinite(planned):
            self._moved = run.stream.position, int(now - planned)

    def _skip_batches(self, run: FitRun) -> None:
        """Skip the batches of an open epoch of another library: its file records how many there were."""
        num_batches = run.progress.batches_in_epoch
        self._open_stream(run)
        for _ in range(num_batches):
            if not run.stream.has_next():
                break
            run.stream.next_batch()

    def run_epoch(self, run: FitRun) -> None:
        """Run one epoch, or the rest of an open one; a subclass may wrap it."""
        progress, trainer = run.progress, self._trainer
        timeline = trainer.timeline
        is_whole = not progress.epoch_open
        if is_whole:
            timeline.enter("epoch")
            self._open_epoch(run)
            timeline.leave()
        progress.epoch_paused = False
        stream = run.stream
        steps_before = progress.steps
        self.next_validation = self.plan_validation(run)
        self.look_at = self.seams.when_to_look(self, run)
        accumulate = self.accumulation_for_epoch(progress.epochs)
        run.metrics.is_weighing_steps = accumulate > 1 or run.plan.hold is not None
        train_window = run.lifecycle.bracketed(self.seams.train_window, "run_training_step")
        if run.left_out is not None:
            train_window = run.left_out.around(train_window)
        stop_points, carried = run.stop_points, run.carried
        is_skipped = progress.epoch_left
        while True:
            if progress.total_batches >= timeline.due:
                timeline.open(run)
            size = 0 if is_skipped else stream.remaining(accumulate - carried.count if carried else accumulate)
            if not size or progress.batches_in_epoch >= self.look_at:
                if self.seams.validation_is_due(self, run, is_epoch_over=not size):
                    run.session.validate()
                self.next_validation = self.plan_validation(run)
                self.look_at = self.seams.when_to_look(self, run)
            if stop_points is not None:
                stop_points.begin_phase(may_stop=self.may_stop and not self.is_at_limit)
            elif run.run_signals.is_called:
                run.run_signals.check()
                trainer.wait_for_save()  # no signal: a save failed
            if not size or self.is_used_up or (progress.steps >= self.max_steps != -1 and not self.plan_counts_steps):
                break
            if trainer.should_stop and self.stops_here:
                break
            is_skipped = not train_window(run, size)
            if timeline.is_open:
                timeline.close(run)
        if timeline.is_open:
            timeline.drop(run)
        is_over = not size
        timeline.enter("epoch")
        is_stuck = is_whole and progress.steps == steps_before and not (carried and carried.count)
        self.seams.close_epoch(self, run, is_over=is_over, is_stuck=is_stuck)
        timeline.leave()

    def _open_epoch(self, run: FitRun) -> None:
        progress = run.progress
        run.session.reload_training_if_due()
        progress.batches_in_epoch, self._moved = 0, (0, 0)
        if not progress.epoch_announced:  # a checkpoint may have been taken then
            run.lifecycle.on_train_epoch_start()
        self._open_stream(run)
        progress.epoch_open, progress.epoch_announced = True, False

    def _open_stream(self, run: FitRun) -> None:
        if run.has_ranks:
            from . import rank_coordination

            rank_coordination.open_epoch(run)
        else:
            run.stream.open(run.progress.epochs, may_be_empty=True)

    def close_epoch(self, run: FitRun, *, is_over: bool, is_stuck: bool) -> None:
        """Fire the end of the epoch. One that a limit cut short stays open: more training continues within it."""
        progress = run.progress
        run.watch.look(progress)
        run.metrics.batch = run.metrics.sized = None
        run.metrics.publish_epoch("train", progress.steps)
        run.metrics.show_epoch("train")
        if run.monitored is not None:  # the epoch has had no logged step
            run.monitored.check_epoch()
        run.is_epoch_over = is_over
        progress.epoch_paused = not is_over
        run.lifecycle.on_train_epoch_end()
        run.validated = None
        while run.after_epoch:
            run.after_epoch.pop(0)()
        if is_over:
            progress.end_epoch()
        counts_steps = run.is_automatic and not run.plan.needs_closure
        if is_over and is_stuck and self.epoch_limit == -1 and not self.is_done and counts_steps:
            raise DataError(
                f"epoch {progress.epochs - 1} ended without an optimizer step, and only steps limit the run.",
                fix="set max_epochs, or make sure that some batch has a loss: every one was skipped.",
            )
        if is_over and is_stuck and run.own_steps is not None and not progress.steps and progress.epochs == 1:
            self._tell_of_no_step()

    def _tell_of_no_step(self) -> None:
        """Warn after the first epoch if the module made no step that counts; an error where only steps end the run.

        Raises:
            DataError: No other limit is set.
        """
        what = "Epoch 0 ended without a training step: training_step stepped no optimizer of the module's parameters"
        fix = "call self.count_step() in training_step before updates that no optimizer makes"
        if self.epoch_limit == -1 and not (self.has_time_limit or self.data_limits or self.is_done):
            raise DataError(f"{what}, and only steps limit the run.", fix=f"{fix}, or set max_epochs.")
        if self._trainer.is_global_zero and not self.is_done:  # else the end of fit logs it
            logger.warning("%s: step values are not logged, and intervals in steps wait. If it trains, %s.", what, fix)

    def _has_epoch_to_close(self, run: FitRun) -> bool:
        """Whether a checkpoint was taken before a validation or the epoch's end that its last step has yet to bring."""
        return run.progress.epoch_open and not run.progress.epoch_paused

    def _check_windows(self, run: FitRun) -> None:
        """Refuse arguments that the optimizer does not support; log how an optimizer that is not torch's steps."""
        plan = run.plan
        if not run.is_automatic:
            self._refuse_to_skip(run, "manual optimization")
        elif plan.needs_closure:
            self._refuse_to_skip(run, type(plan.optimizer).__name__)
            if run.fabric.precision.has_scaler:
                raise ConfigError(
                    f"{type(plan.optimizer).__name__} evaluates the model several times per step, and "
                    f"precision={run.fabric.precision.precision!r} scales the loss for one.",
                    fix="use precision='bf16-mixed' or '32-true', or set evaluates_closure = False on an optimizer "
                    "that needs no second evaluation.",
                )
        for optimizer in run.optimizers if run.is_automatic else ():
            # An engine's wrapper has the class of the user's optimizer.
            if not optimizer.__class__.__module__.startswith("torch."):
                self._tell_closure(optimizer, evaluates=plan.needs_closure)

    def _tell_closure(self, optimizer: Optimizer, *, evaluates: bool) -> None:
        """Log how an optimizer that is not torch's steps: with evaluations of the model, or without."""
        if not self._trainer._lw_reports_runs:
            return
        way = "evaluates the model within its step: each window is run again for every call of its closure"
        if not evaluates:
            way = "gets its gradients before its step, which does not evaluate the model again"
        logger.info("%s %s. Set evaluates_closure on it if that is wrong.", optimizer.__class__.__name__, way)

    def _refuse_to_skip(self, run: FitRun, where: str) -> None:
        if run.skips_bad_steps:
            raise ConfigError(
                f"nonfinite_loss='skip' with {where}, where the trainer does not decide whether to step.",
                fix="pass nonfinite_loss='raise' or 'warn', and leave such steps out in the module.",
            )

    # --- validation ------------------------------------------------------------------------------------------------

    @property
    def validates_in_this_epoch(self) -> bool:
        """Whether `check_val_every_n_epoch` selects the present epoch."""
        every = self._trainer.check_val_every_n_epoch
        return every is None or (self._trainer.progress.epochs + 1) % every == 0

    @property
    def _validates_at_end(self) -> bool:
        """Whether to validate once per epoch, at its end."""
        trainer = self._trainer
        interval = trainer.val_check_interval
        return trainer.check_val_every_n_epoch is not None and isinstance(interval, float) and interval == 1.0

    def plan_validation(self, run: FitRun) -> int | float:
        """Return the number of batches (of the epoch, or in total) at which the next validation is due."""
        trainer, progress = self._trainer, run.progress
        interval = run.loaders.interval_batches
        every = trainer.check_val_every_n_epoch
        # The end of an epoch is seen when it comes: a run that was resumed on other ranks has counted otherwise before.
        if interval == math.inf or self._validates_at_end or not self.validates_in_this_epoch:
            return math.inf
        # Counted from the last validation, not from now: one that was pending in a checkpoint is still due.
        epoch_began_at = 0 if every is None else progress.total_batches - progress.batches_in_epoch
        validated = max(progress.validated_at - epoch_began_at, 0)
        first, offset = self._moved if every is not None else (0, 0)
        if offset:  # validations come at the same samples as without the change
            validated = max(validated, first - 1)
        due = ((validated - offset) // interval + 1) * interval + offset
        return math.inf if due > run.loaders.counted_batches else due  # else batches without data would count

    def when_to_look(self, run: FitRun) -> int | float:
        """Return the batch of this epoch from which on a validation may be due: before it, the loop does not ask."""
        trainer, progress = self._trainer, run.progress
        if not trainer.enable_validation:
            return math.inf
        if run.loaders.interval_s is not None:
            return 0
        is_across_epochs = trainer.check_val_every_n_epoch is None
        began_at = progress.total_batches - progress.batches_in_epoch if is_across_epochs else 0
        return self.next_validation - began_at

    def validation_is_due(self, run: FitRun, *, is_epoch_over: bool) -> bool:
        """Whether to validate now. A validation that is due within a window runs right after it."""
        trainer, progress = self._trainer, run.progress
        if not trainer.enable_validation or progress.validated_at == progress.total_batches:
            return False
        every = trainer.check_val_every_n_epoch
        if not self.validates_in_this_epoch or progress.batches_in_epoch == 0:
            return False
        seconds = run.loaders.interval_s
        if seconds is not None:
            return self._is_time_to_validate(run, seconds)
        count = progress.total_batches if every is None else progress.batches_in_epoch
        if count >= self.next_validation:
            return True
        return is_epoch_over and self._validates_at_end

    def _is_time_to_validate(self, run: FitRun, seconds: float) -> bool:
        """Whether this much time has passed, by rank 0's clock, which every rank queries once per window."""
        is_time = self.seconds_since_validation() >= seconds
        if not run.has_ranks:
            return is_time
        if self._asked_at != run.progress.total_batches:
            self._asked_at = run.progress.total_batches
            self._rank_zero_said = bool(run.fabric.broadcast(is_time))
        return self._rank_zero_said

    def is_validation_due(self, run: FitRun) -> bool:
        """Whether a validation follows the step whose events are being handled."""
        if not run.at_boundary or run.opened is None:
            return False
        return self.seams.validation_is_due(self, run, is_epoch_over=not run.stream.has_next())

    def mark_validated(self, run: FitRun) -> None:
        """Note that the validation that was due is done."""
        run.progress.validated_at = run.progress.total_batches
        self._validation_clock_s = time.monotonic()

    def seconds_since_validation(self) -> float:
        """Return the seconds of training since the last validation, earlier runs of a resumed training included."""
        return time.monotonic() - self._validation_clock_s


class _ClosesEpoch(Protocol):
    def __call__(self, loop: FitLoop, /, run: FitRun, *, is_over: bool, is_stuck: bool) -> None: ...


class _IsDue(Protocol):
    def __call__(self, loop: FitLoop, /, run: FitRun, *, is_epoch_over: bool) -> bool: ...


@dataclass(frozen=True, slots=True)
class LoopSeams:
    """The functions of a `FitLoop` that a layer for another library can replace; the defaults are its methods.

    Attributes:
        train_window: Trains on the next window; see `window.train_window`.
        close_epoch: Fires the end of an epoch.
        validation_is_due: Whether to validate now.
        when_to_look: Returns the batch of this epoch from which on a validation may be due.
    """

    train_window: Callable[[FitRun, int], bool] = train_window
    close_epoch: _ClosesEpoch = FitLoop.close_epoch
    validation_is_due: _IsDue = FitLoop.validation_is_due
    when_to_look: Callable[[FitLoop, FitRun], int | float] = FitLoop.when_to_look


def _rest_of_step(run: FitRun) -> str:
    """Return the phase to which the timeline counts the time of a step that no other phase has."""
    if run.plan.needs_closure:
        return "optimizer"
    return "loop" if run.plan.run_window is None else "backward"


def estimate_steps(trainer: TrainerView, num_batches: int | float) -> int | float:
    """Return the training steps that a fit will take in all; infinity where no limit is known.

    Args:
        trainer: Whose limits hold; its training loader is open.
        num_batches: Batches of an epoch on one rank; infinity where that is unknown.
    """
    loop = trainer.fit_loop
    limit, max_steps = loop.epoch_limit, loop.max_steps if loop.max_steps != -1 else math.inf
    if trainer.max_samples is not None:
        from .data_limits import steps_until_max_samples

        max_steps = min(max_steps, steps_until_max_samples(trainer, num_batches, limit))
    if limit == -1 or math.isinf(num_batches):
        return max_steps
    scheduler, accumulate = trainer.accumulation_scheduler, trainer.accumulate_grad_batches
    if scheduler is not None:
        sizes = [scheduler.get_accumulate_grad_batches(epoch) for epoch in range(limit)]
        total = sum(math.ceil(num_batches / size) for size in sizes)
    elif trainer.accumulate_across_epochs:
        total = math.ceil(num_batches * limit / accumulate)
    else:
        total = math.ceil(num_batches / accumulate) * limit
    return min(total, max_steps)
