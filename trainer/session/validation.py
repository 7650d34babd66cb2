"""Validations within fit: the sanity check before training, and those between two steps. They leave no trace."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

from ...data.rng import restore_rng
from ..checkpointing import snapshot

if TYPE_CHECKING:
    from ..run import FitRun
    from .fit import FitSession


def check_sanity(session: FitSession) -> None:
    """Validate a few batches, to find mistakes before an epoch has been spent. Leaves no trace."""
    run, loaders, state = session.run, session.loaders, session.state
    if session.loop.is_done or not session.arguments.num_sanity_val_steps or not loaders.may_validate():
        return
    _share_buffers(run)
    window = run.metrics.window
    before = run.before_validation = snapshot.before_validation(run)
    state.stage = "sanity_check"
    run.lifecycle.on_sanity_check_start()
    # A first call of val_dataloader is part of the check, and what it draws at random is undone with it.
    data = loaders.open_sanity()
    generators = before.generators = loaders.capture_generators()
    if data is not None and data.num_batches:
        session.behavior.evaluation_loop(session, "validation", data).run(run, data)
    if run.monitored is not None:
        run.monitored.check_validation()
    run.metrics.discard_epoch("validation")
    run.metrics.window = window
    run.lifecycle.on_sanity_check_end()
    state.stage = "train"
    run.before_validation = None
    loaders.restore_generators(generators)
    restore_rng(before.rng)


def validate(session: FitSession) -> None:
    """Validate between two training steps. The random number generators of training do not change."""
    run, loaders, state = session.run, session.loaders, session.state
    _share_buffers(run)
    run.metrics.batch = run.metrics.sized = None  # the last training batch is not kept during the validation
    state.stage = "validate"
    session.reload_validation_if_due()
    data = loaders.open_validation()
    if data is None or not data.num_batches:
        state.stage = "train"
        return
    before = run.before_validation = snapshot.before_validation(run)
    session.free_gradients()
    evaluate = run.lifecycle.bracketed(
        session.behavior.evaluation_loop(session, "validation", data).run, "[EvalLoop].validation"
    )
    weights = run.evaluation_weights
    timeline = session.trainer.timeline
    with (
        nullcontext() if weights is None else weights.evaluating(),
        timeline.own_time("validation", session.strategy, run.model),
    ):
        timeline.timed("validation", evaluate)(run, data)
    session.trainer.training_rng.leave_validation(run, before)
    run.before_validation = None
    if run.validated is not None and run.stream.has_next() and not session.loop.is_done:
        run.validated = None  # more batches of this epoch follow
    state.stage = "train"


def free_gradients(run: FitRun) -> None:
    """Zero the gradients before a validation, by the module's hook where it has one."""
    own = run.lifecycle.own("on_validation_model_zero_grad")
    if own is not None:
        own()
    # Else the module may be accumulating, or the window continues after the epoch's end.
    elif run.is_automatic and not (run.carried is not None and run.carried.count):
        run.module.zero_grad()


def _share_buffers(run: FitRun) -> None:
    """Let all ranks evaluate the same module: until now, each rank has running statistics of its own data."""
    if run.has_ranks:
        run.fabric.strategy.sync_buffers(run.model)
