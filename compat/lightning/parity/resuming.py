"""A resumed run as in Lightning: its counts until training begins, and the events that it leaves unfinished."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial

from ....checkpoint.content import Content
from ....protocols import StateDict
from ....trainer.behavior import Behavior
from ....trainer.hooks import Hook
from ....trainer.run import FitRun
from ....trainer.session.fit import FitSession
from ..actions import lifecycle_of
from ..loops import fit_session_of

__all__ = [
    "begin_new_logs",
    "begin_with_saved_epoch",
    "leave_events_unfinished",
    "leave_frozen_as_it_is",
    "start_before_restoring",
]


def start_before_restoring(behavior: Behavior) -> Behavior:
    """Let `on_fit_start` come before counts and states of optimizers are read from a checkpoint."""
    return replace(behavior, restore_and_start=_start_and_restore)


def _start_and_restore(
    session: FitSession, content: Content | None, path: str | None, before: StateDict | None
) -> Callable[[], None] | None:
    session.state.stage = "train"
    session.run.lifecycle.on_fit_start()
    session.write_hyperparameters()
    return session.restore_training(content, path, before)


def leave_frozen_as_it_is(behavior: Behavior) -> Behavior:
    """Let the program say which parameters require gradients and which modules evaluate, not the checkpoint."""
    return replace(behavior, restore_and_start=partial(_restore_without_frozen, behavior.restore_and_start))


def _restore_without_frozen(
    restore: Callable[..., Callable[[], None] | None],
    session: FitSession,
    content: Content | None,
    path: str | None,
    before: StateDict | None,
) -> Callable[[], None] | None:
    if content is not None:
        content.states.pop("frozen", None)
    return restore(session, content, path, before)


def begin_new_logs(behavior: Behavior) -> Behavior:
    """Let loggers of a resumed fit write as in any fit: where their arguments say, after existing rows."""
    return replace(behavior, continue_logs=_continue_nothing)


def _continue_nothing(session: FitSession, states: StateDict) -> None:
    """Leave loggers as they are."""


def begin_with_saved_epoch(run: FitRun) -> None:
    """Let a resumed fit see the epoch at whose end the checkpoint was taken, until training begins."""
    lifecycle, progress = lifecycle_of(run), run.progress
    saved: list[int] = []

    def noting(fire: Hook) -> Hook:
        def on_load_checkpoint(checkpoint: StateDict) -> None:
            saved[:] = [int(checkpoint.get("epoch", 0))]
            fire(checkpoint)

        return on_load_checkpoint

    @contextmanager
    def at_saved_epoch() -> Iterator[None]:
        now = progress.epochs
        progress.epochs = min(*saved, now) if saved else now
        try:
            yield
        finally:
            progress.epochs = now

    until: list[ExitStack] = []

    def at_sanity_check(fire: Hook) -> Hook:
        def on_sanity_check_start() -> None:
            until.append(ExitStack())
            until[-1].enter_context(at_saved_epoch())
            fire()

        return on_sanity_check_start

    def after_sanity_check(fire: Hook) -> Hook:
        def on_sanity_check_end() -> None:
            fire()
            until.pop().close()

        return on_sanity_check_end

    def at_fit_start(fire: Hook) -> Hook:
        def on_fit_start() -> None:
            fire()
            if saved:
                fit_session_of(run).opening = at_saved_epoch

        return on_fit_start

    lifecycle.put_around_callbacks("on_load_checkpoint", noting)
    lifecycle.wrap("on_fit_start", at_fit_start)
    lifecycle.wrap("on_sanity_check_start", at_sanity_check)
    lifecycle.wrap("on_sanity_check_end", after_sanity_check)


def leave_events_unfinished(run: FitRun) -> None:
    """Let a resumed run continue after the event in which its checkpoint was taken.

    A validation that was to follow is left out; only its first loader is iterated. After an epoch's last batch, the end
    of the epoch and the beginning of the next are left out, too.
    """
    run.unfinished = {}
    progress, stream, loop = run.progress, run.stream, run.trainer.fit_loop
    if not progress.epoch_open or progress.epoch_paused or stream is None:
        return
    if progress.validated_at == progress.total_batches:
        return
    is_at_end = bool(stream.state_dict()["is_at_end"])
    loop.next_validation = loop.plan_validation(run)
    if loop.validation_is_due(run, is_epoch_over=is_at_end):
        counts = getattr(run.trainer, "loop_counts", None)
        if counts is not None:
            counts.leaves_validation_out = True
        run.lifecycle.wrap("on_train_start", partial(_and_begin_to_validate, run))
        progress.validated_at = progress.total_batches
    if is_at_end:
        progress.end_epoch()
        progress.epoch_announced = True


def _and_begin_to_validate(run: FitRun, fire: Hook) -> Hook:
    def on_train_start() -> None:
        fire()
        data = run.loaders.open_validation()
        if data is not None:
            next(iter(data), None)

    return on_train_start
