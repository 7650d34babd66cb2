"""Schedules as Lightning steps them: by the number of the batch in its epoch, plateaus after checkpoints."""

from __future__ import annotations

import warnings
from functools import partial

from ....errors import ModuleError, nearest
from ....protocols import AnyBatch
from ....trainer.hooks import Hook
from ....trainer.loop.schedule import LRSchedulerConfig, step_scheduler
from ....trainer.run import FitRun

__all__ = ["count_batches", "save_before_plateaus"]


def count_batches(run: FitRun) -> None:
    """Let schedules that count steps count the batches of the epoch, and be stepped where a window ends.

    Plateau schedules among them follow at the next batch, or at the epoch's end: after a validation that is due.
    """
    plan = run.plan
    if not run.schedulers or not run.is_automatic:
        return
    begin_window = plan.begin_window
    waiting: list[int] = []

    def step_schedules(run: FitRun) -> None:
        number, stream = run.progress.batches_in_epoch, run.stream
        own = run.lifecycle.own("lr_scheduler_step")
        for interval, count in (("step", number), ("epoch", run.progress.epochs + 1)):
            if interval == "step" or not stream.has_next():
                for config in run.schedulers:
                    if not config.reduce_on_plateau and config.is_due(interval, count):
                        step_scheduler(config, None, own)
        waiting[:] = [number]

    def step_waiting() -> None:
        if waiting:
            number = waiting.pop()
            for config in run.schedulers:
                if config.reduce_on_plateau and config.is_due("step", number):
                    step_plateau(run, config)

    def at_batch_start(fire: Hook) -> Hook:
        def on_train_batch_start(batch: AnyBatch, index: int) -> object:
            result = fire(batch, index)
            if result == -1:  # the batch is left out, and is the epoch's last
                own = run.lifecycle.own("lr_scheduler_step")
                for config in run.schedulers:
                    if not config.reduce_on_plateau and config.is_due("step", index + 1):
                        step_scheduler(config, None, own)
            return result

        return on_train_batch_start

    def begin(size: int) -> None:
        step_waiting()
        begin_window(size)

    def before(end_epoch: Hook) -> Hook:
        def on_train_epoch_end() -> None:
            step_waiting()
            end_epoch()

        return on_train_epoch_end

    plan.step_schedules, plan.begin_window = step_schedules, begin
    run.lifecycle.wrap("on_train_batch_start", at_batch_start)
    if any(config.reduce_on_plateau and config.interval == "step" for config in run.schedulers):
        run.lifecycle.wrap("on_train_epoch_end", before)


def save_before_plateaus(run: FitRun) -> None:
    """Step plateau schedules after the epoch's checkpoints, at each epoch with the latest value."""
    plan = run.plan
    if not run.is_automatic:
        return

    def step_plateaus(run: FitRun, epochs: int) -> None:
        for config in run.schedulers:
            if config.reduce_on_plateau and config.is_due("epoch", epochs):
                run.after_epoch.append(partial(step_plateau, run, config))

    plan.step_plateaus = step_plateaus


def step_plateau(run: FitRun, config: LRSchedulerConfig) -> None:
    """Step a plateau schedule with the latest value of its metric, whether it has had it before or not.

    Raises:
        ModuleError: There is no value, and the schedule is strict.
    """
    name, values = str(config.monitor), run.metrics.callback_metrics()
    if name in values:
        step_scheduler(config, values[name], run.lifecycle.own("lr_scheduler_step"))
        return
    known = sorted(values)
    if config.strict:
        raise ModuleError(
            f"the schedule {type(config.scheduler).__name__} monitors {name!r}{nearest(name, known)}, which was not "
            f"logged; logged are {known}.",
            fix=f"log it with self.log({name!r}, value), or set strict=False in the schedule's dict.",
        )
    warnings.warn(f"the schedule's metric {name!r} was not logged; it is not stepped", stacklevel=2)
