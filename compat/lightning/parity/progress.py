"""What Lightning's loops count, at each hook: epochs, batches, and the steps of optimizers and schedules.

The counts are for programs to read. Training itself counts in `trainer.progress`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from ....protocols import Batch, StateDict
from ....trainer.hooks import Hook
from ....trainer.run import FitRun
from ....trainer.trainer import Trainer
from ..actions import lifecycle_of
from ..loops import TrackedCounts, trainer_of

if TYPE_CHECKING:
    from ..trainer import Trainer as LightningTrainer

__all__ = ["Count", "LoopCounts", "begin_counts", "count_zero_grad", "follow_hooks"]

_ALL = ("ready", "started", "processed", "completed")
_STEP = ("ready", "completed")
_ZERO = ("ready", "started", "completed")


class Count:
    """How far the events of one kind are, in total and in the present run of their loop.

    Attributes:
        total: Since the start of training.
        current: Since the loop began.
        is_last_batch: Of batches: whether the present one is the last.
    """

    def __init__(self, names: tuple[str, ...] = _ALL) -> None:
        self.names = names
        self.total, self.current = TrackedCounts(**dict.fromkeys(names, 0)), TrackedCounts(**dict.fromkeys(names, 0))
        self.is_last_batch = False

    def add(self, name: str, number: int = 1) -> None:
        """Count events more that are ready, started, processed or completed."""
        for counts in (self.total, self.current):
            vars(counts)[name] += number

    def level(self, name: str) -> None:
        """Let each count in `current` be the one of this name."""
        vars(self.current).update(dict.fromkeys(self.names, getattr(self.current, name)))

    def clear(self, *, total: bool = False, current: bool = True) -> None:
        """Count from zero again."""
        for counts, is_meant in ((self.total, total), (self.current, current)):
            if is_meant:
                vars(counts).update(dict.fromkeys(self.names, 0))
        if current:
            self.is_last_batch = False

    def state_dict(self) -> StateDict:
        """Return the counts as a checkpoint of Lightning has them."""
        counts: StateDict = {"total": dict(vars(self.total)), "current": dict(vars(self.current))}
        return {**counts, "is_last_batch": self.is_last_batch} if self.names is _ALL else counts

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from the counts of a checkpoint."""
        vars(self.total).update(state.get("total", {}))
        vars(self.current).update(state.get("current", {}))
        self.is_last_batch = bool(state.get("is_last_batch", False))


class LoopCounts:
    """The counts of the loops of a trainer.

    Args:
        trainer: The trainer.

    Attributes:
        leaves_validation_out: Whether a resumed run continues after a validation that was due and did not take place.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.epoch, self.batch = Count(), Count()
        self.step, self.zero_grad, self.manual, self.schedule = Count(_STEP), Count(_ZERO), Count(_STEP), Count(_STEP)
        self.evaluated = {key: Count() for key in ("fit", "validation", "test", "predict")}
        self.leaves_validation_out = False
        self._loaded: Mapping[str, Any] | None = None
        self._restarts = self._is_in_batch = self._steps_at_end = False

    # --- checkpoints -----------------------------------------------------------------------------------------------

    def _of_fit(self) -> dict[str, Count]:
        return {
            "epoch_progress": self.epoch,
            "epoch_loop.batch_progress": self.batch,
            "epoch_loop.scheduler_progress": self.schedule,
            "epoch_loop.manual_optimization.optim_step_progress": self.manual,
            "epoch_loop.val_loop.batch_progress": self.evaluated["fit"],
        }

    def fit_state(self) -> StateDict:
        """Return the counts of fit as a checkpoint of Lightning has them."""
        optimizer = {"step": self.step.state_dict(), "zero_grad": self.zero_grad.state_dict()}
        return {
            **{key: count.state_dict() for key, count in self._of_fit().items()},
            "epoch_loop.automatic_optimization.optim_progress": {"optimizer": optimizer},
        }

    def note_checkpoint(self, checkpoint: StateDict) -> None:
        """Keep the checkpoint from which a fit continues; its counts are read after `on_fit_start`."""
        self._loaded = checkpoint.get("loops", {}).get("fit_loop")

    def load(self) -> None:
        """Read the counts of the checkpoint that was kept."""
        if self._loaded is None:
            return
        for key, count in self._of_fit().items():
            count.load(self._loaded.get(key, {}))
        found = self._loaded.get("epoch_loop.automatic_optimization.optim_progress", {}).get("optimizer", {})
        self.step.load(found.get("step", {}))
        self.zero_grad.load(found.get("zero_grad", {}))
        now = self.epoch.current
        is_unfinished = now.ready != now.processed or now.started != now.processed
        self._restarts = is_unfinished or self._counts_steps  # the fit continues within an epoch

    @property
    def _counts_steps(self) -> bool:
        """Whether only steps limit the fit."""
        return self._trainer.max_steps != -1 and self._trainer.max_epochs in (None, -1)

    # --- fit -------------------------------------------------------------------------------------------------------

    @property
    def is_fit_over(self) -> bool:
        """Whether a fit that begins has nothing to do."""
        trainer = self._trainer
        epochs, steps = trainer.fit_loop.epoch_limit, trainer.max_steps
        is_at_step = steps != -1 and trainer.global_step >= steps
        return trainer.limit_train_batches == 0 or is_at_step or -1 < epochs <= self.epoch.current.processed

    def begin_fit(self) -> None:
        """Continue from the event at which the checkpoint was taken, before `on_train_start`."""
        epoch, now = self.epoch, self.epoch.total
        if self._loaded is not None:
            is_begun, is_processed = now.started == now.ready, now.processed == now.started
            is_in_epoch = is_begun and now.processed == now.started - 1 and now.completed == now.processed
            is_after_epoch = is_begun and is_processed and now.completed == now.processed - 1
            if self._restarts and now.started == now.ready - 1 and is_processed:
                epoch.level("completed")
            if not self._restarts and is_after_epoch:
                epoch.add("completed")
            if self._restarts and self._ended_within_batch and self.batch.is_last_batch:
                if is_in_epoch:
                    epoch.add("processed")
                    epoch.add("completed")
                elif not self.evaluated["fit"].is_last_batch:
                    epoch.add("completed")
        if not self._counts_steps:
            vars(epoch.current).update(completed=epoch.current.processed)

    @property
    def _ended_within_batch(self) -> bool:
        now = self.batch.total
        return now.started == now.ready and now.processed == now.started and now.completed == now.processed - 1

    def begin_batches(self) -> None:
        """Begin the batches of an epoch, or continue with them in a resumed run."""
        counts = (self.batch, self.schedule, self.step, self.zero_grad)
        is_over = not self._restarts
        if self._restarts:
            if self._ended_within_batch:
                self.batch.add("completed")
                is_over = self.batch.current.completed >= self._trainer.num_training_batches
            for count in counts:
                if is_over:
                    count.clear()
                count.level("completed")
        else:
            for count in counts:
                count.clear()
        validated = self.evaluated["fit"]
        if is_over:
            validated.clear(total=True, current=False)
        if self.leaves_validation_out:
            most = max(self._trainer.num_val_batches, default=0)
            validated.level("completed")
            for name in _ALL if math.isfinite(most) else ():
                validated.add(name, int(most))
            validated.is_last_batch = True
        self._loaded, self._restarts, self.leaves_validation_out = None, False, False

    def begin_batch(self, run: FitRun) -> None:
        """Count a batch as ready."""
        self.batch.is_last_batch = not run.stream.has_next()
        self.batch.add("ready")

    def start_batch(self, run: FitRun) -> None:
        """Count a batch that is trained on, and the step that it ends in."""
        trainer, ready = self._trainer, self.batch.current.ready
        self.batch.add("started")
        self._is_in_batch = True
        is_last = self.batch.is_last_batch or ready == trainer.num_training_batches
        is_whole = ready % trainer.fit_loop.accumulation_for_epoch(trainer.current_epoch) == 0
        self._steps_at_end = run.is_automatic and (is_whole or is_last)
        if self._steps_at_end:
            self.step.add("ready")

    def finish_batch(self) -> None:
        """Count a batch as processed, and its step as completed: before the schedules are stepped."""
        if not self._is_in_batch:
            return
        self._is_in_batch = False
        self.batch.add("processed")
        if self._steps_at_end:
            self.step.add("completed")

    def end_epoch(self) -> None:
        """Count the epoch as completed, if it is processed."""
        if self.epoch.total.completed < self.epoch.total.processed:
            self.epoch.add("completed")


def begin_counts(trainer: LightningTrainer) -> None:
    """Let the loops of a Trainer count as Lightning's do, and a fit that has nothing to do not begin to train."""
    trainer.loop_counts = LoopCounts(trainer)


def count_zero_grad(run: FitRun) -> None:
    """Count the gradients that are zeroed."""
    counts = trainer_of(run).loop_counts
    assert counts is not None
    plan = run.plan
    if not run.is_automatic:
        return
    zero, count = plan.zero_grad, counts.zero_grad

    def zero_grad() -> None:
        started = count.total.started
        count.add("ready")
        zero()
        if count.total.started == started:  # without listeners, on_before_zero_grad is not fired
            count.add("started")
        count.add("completed")

    plan.zero_grad = zero_grad


def follow_hooks(run: FitRun) -> None:
    """Count what happens around the hooks of a run."""
    counts = trainer_of(run).loop_counts
    assert counts is not None
    lifecycle = lifecycle_of(run)

    def counting(hook: Hook | None) -> Hook:
        counts.finish_batch()
        step: Any = hook or run.module.lr_scheduler_step
        return partial(_step_schedule, counts.schedule, step)

    lifecycle.put_around_own("lr_scheduler_step", counting)
    lifecycle.put_around_callbacks("on_load_checkpoint", partial(partial, _note_checkpoint, counts))
    for name, around in (
        ("on_fit_start", _around_fit_start),
        ("on_train_start", partial(_around_training, run)),
        ("on_train_epoch_start", _around_epoch_start),
        ("on_train_batch_start", partial(_around_batch_start, run)),
        ("on_before_zero_grad", _around_zero_grad),
        ("on_before_optimizer_step", partial(_around_own_step, run)),
        ("on_train_batch_end", _around_batch_end),
        ("on_train_epoch_end", _around_epoch_end),
        ("on_train_end", _around_train_end),
        ("on_sanity_check_end", _around_sanity_check),
    ):
        lifecycle.wrap(name, partial(_wrapped, around, counts))
    for stage in ("validation", "test", "predict"):
        count = counts.evaluated["fit" if run.trainer.state.fn == "fit" else stage]
        for name, moments in (("start", ("ready", "started")), ("end", ("processed", "completed"))):
            lifecycle.wrap(f"on_{stage}_batch_{name}", partial(_count_batch, run, stage, count, moments))
        lifecycle.wrap(f"on_{stage}_start", partial(_count_from_zero, count))


def _wrapped(around: Any, counts: LoopCounts, fire: Hook) -> Hook:  # Any: one of the functions below
    return partial(around, counts, fire)


def _step_schedule(count: Count, step: Hook, *arguments: object) -> None:
    count.add("ready")
    step(*arguments)
    count.add("completed")


def _note_checkpoint(counts: LoopCounts, fire: Hook, checkpoint: StateDict) -> None:
    counts.note_checkpoint(checkpoint)
    fire(checkpoint)


def _around_fit_start(counts: LoopCounts, fire: Hook) -> None:
    fire()
    counts.load()


def _around_training(run: FitRun, counts: LoopCounts, fire: Hook) -> None:
    counts.begin_fit()
    fire()
    if (run.progress.epoch_open or run.progress.epoch_announced) and not run.trainer.fit_loop.is_done:
        counts.begin_batches()


def _around_epoch_start(counts: LoopCounts, fire: Hook) -> None:
    counts.end_epoch()
    counts.epoch.add("ready")
    fire()
    counts.epoch.add("started")
    counts.begin_batches()


def _around_batch_start(run: FitRun, counts: LoopCounts, fire: Hook, batch: Batch, index: int) -> object:
    counts.begin_batch(run)
    result = fire(batch, index)
    if result == -1:
        counts.batch.is_last_batch = True
        counts.batch.add("processed")
    else:
        counts.start_batch(run)
    return result


def _around_zero_grad(counts: LoopCounts, fire: Hook, optimizer: Optimizer) -> None:
    fire(optimizer)
    counts.zero_grad.add("started")


def _around_own_step(run: FitRun, counts: LoopCounts, fire: Hook, optimizer: Optimizer) -> None:
    if run.is_automatic:
        fire(optimizer)
        return
    counts.manual.add("ready")
    fire(optimizer)
    counts.manual.add("completed")


def _around_batch_end(counts: LoopCounts, fire: Hook, *arguments: object) -> None:
    counts.finish_batch()
    fire(*arguments)
    counts.batch.add("completed")


def _around_epoch_end(counts: LoopCounts, fire: Hook) -> None:
    counts.epoch.add("processed")
    fire()


def _around_train_end(counts: LoopCounts, fire: Hook) -> None:
    counts.end_epoch()
    fire()


def _around_sanity_check(counts: LoopCounts, fire: Hook) -> None:
    fire()
    counts.evaluated["fit"].clear(total=True)


def _count_from_zero(count: Count, fire: Hook) -> Hook:
    def begin() -> object:
        count.clear()
        result: object = fire()
        return result

    return begin


def _count_batch(run: FitRun, stage: str, count: Count, moments: tuple[str, str], fire: Hook) -> Hook:
    def counted(*arguments: object) -> object:
        if moments[0] == "ready":
            trainer = trainer_of(run)
            limits = (
                trainer.num_sanity_val_batches if trainer.sanity_checking else trainer.parts.loaders.num_batches(stage)
            )
            count.is_last_batch = count.current.ready + 1 == sum(limits)
        count.add(moments[0])
        result: object = fire(*arguments)
        count.add(moments[1])
        return result

    return counted
