"""What Lightning does between two micro-batches of a window: validate, stop, save, and continue a resumed run there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from ....trainer.behavior import Behavior
from ....trainer.hooks import Hook
from ....trainer.run import FitRun
from ..loops import fit_session_of
from .windows import window_size

__all__ = ["WindowEnded", "act_within_windows", "end_windows_early"]


class WindowEnded(Exception):
    """The epoch ends after a micro-batch that does not complete a window; its gradients are not used.

    Args:
        batches_in_epoch: Micro-batches of the epoch until then.
    """

    def __init__(self, batches_in_epoch: int) -> None:
        super().__init__()
        self.batches_in_epoch = batches_in_epoch


def end_windows_early(behavior: Behavior) -> Behavior:
    """Let a window end where training stops, and where it does when all batches of the epoch are counted."""
    train = partial(_train_until_end, behavior.loop.train_window)
    return replace(behavior, loop=replace(behavior.loop, train_window=train))


def _train_until_end(train_window: Callable[[FitRun, int], bool], run: FitRun, size: int) -> bool:
    if not run.is_automatic:
        return train_window(run, size)
    full = window_size(run)()
    try:
        return train_window(run, min(size, full - run.progress.batches_in_epoch % full))
    except WindowEnded as end:
        _advance(run, end.batches_in_epoch - run.progress.batches_in_epoch)
        run.at_boundary, run.has_stepped = True, False
        return True


def act_within_windows(run: FitRun) -> None:
    """Let a validation that is due follow the micro-batch at which it is, and training stop and save there."""
    if not run.is_automatic:
        return
    run.lifecycle.wrap("on_train_batch_end", partial(_then_validate, run))
    plan, full_size = run.plan, window_size(run)
    zero_grad = plan.zero_grad

    def zero_at_first() -> None:
        if run.progress.batches_in_epoch % full_size() == 0:  # else the run was resumed within a window
            zero_grad()

    plan.zero_grad = zero_at_first
    fit_session_of(run).counting_window = partial(_counted, run)


def _then_validate(run: FitRun, fire: Hook) -> Hook:
    trainer, loop = run.trainer, run.trainer.fit_loop

    def on_train_batch_end(outputs: Any, batch: Any, index: int) -> None:  # Any: of any user
        fire(outputs, batch, index)
        if run.at_boundary:
            return
        with _counted(run):
            if index + 1 >= loop.look_at:
                if loop.seams.validation_is_due(loop, run, is_epoch_over=False):
                    _validate(run)
                    if run.stop_points is not None:
                        run.stop_points.begin_phase(may_stop=loop.may_stop)
                loop.next_validation = loop.plan_validation(run)
                loop.look_at = loop.seams.when_to_look(loop, run)
            if trainer.should_stop and loop.stops_here:
                raise WindowEnded(index + 1)

    return on_train_batch_end


def _validate(run: FitRun) -> None:
    """Validate with the gradients of the window kept; rows stand at the step that the window will make."""
    metrics, session = run.metrics, fit_session_of(run)
    window = metrics.window
    session.is_within_window = True
    try:
        session.validate()
    finally:
        session.is_within_window = False
    metrics.window += 1  # what the window logs from now on is newer than the validation's values
    for accumulator in metrics.accumulators("train"):  # an evaluation counts windows, too
        if accumulator.window == window:
            accumulator.window = metrics.window


@contextmanager
def _counted(run: FitRun) -> Iterator[None]:
    """Count the micro-batches of the present window as done."""
    num_batches = run.batch_idx + 1 - run.progress.batches_in_epoch
    _advance(run, num_batches)
    run.at_boundary = True
    try:
        yield
    finally:
        _advance(run, -num_batches)
        run.at_boundary = False


def _advance(run: FitRun, num_batches: int) -> None:
    run.progress.batches_in_epoch += num_batches
    run.progress.total_batches += num_batches
