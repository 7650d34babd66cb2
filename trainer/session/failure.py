"""The end of a verb with an error: its cause, who is notified, and what is logged. Imported when that happens."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from torch import Tensor

from ...accelerators.out_of_memory import is_out_of_memory
from ...errors import LoopwrightError, ReplayEnd, StopBySignal, add_nearest
from ...strategies.memory_report import advise, memory_report
from ..batch_shapes import shapes_of
from ..checkpointing.requeue import requeue
from ..describe_run import describe_run
from ..error_place import place_of
from ..fit_lines import tell_failure
from ..graph_advice import advice_on_evaluation, advice_on_graph
from ..hooks import MODULE_BASES, find_override
from ..inference_tensors import advice_on
from ..loop.run_signals import add_place

if TYPE_CHECKING:
    from torch import nn

    from ..run import Run
    from .session import Session

logger_ = logging.getLogger(__name__)

_STEPS = {"training_step", "validation_step", "test_step", "predict_step"}


def fail(session: Session, error: BaseException) -> None:
    """Notify callbacks, data module and loggers that the verb has failed, and log it.

    Args:
        session: The verb; its run may not exist yet.
        error: What ended it.

    Raises:
        BaseException: The failure of another rank, or the agreed stop, that this error only follows from; or what a
            layer on top raises instead.
    """
    trainer = session.trainer
    session.state.status = "interrupted"
    if isinstance(error, ReplayEnd):  # on all ranks alike; hooks that write are not called
        return
    if isinstance(error, StopBySignal) and trainer.run_signals.is_to_requeue:
        requeue(trainer)
    cause = _cause_elsewhere(session, error) or error
    if trainer._lw_run is not None:
        _explain(session, trainer._lw_run, cause)
        _notify(session, trainer._lw_run, cause)
    tell_failure(trainer, cause)
    raised = session.behavior.error_to_raise(cause)
    if raised is not error:
        raise raised from (None if raised is cause else cause)


def _cause_elsewhere(session: Session, error: BaseException) -> BaseException | None:
    """Return the failure of another rank, or the agreed stop, that this error only follows from; None for none."""
    watch = session.fabric.watch
    if watch is None:
        return None
    run = session.trainer.present_run()
    stop_points = None if run is None else run.stop_points
    if stop_points is not None and stop_points.is_by_signal:
        stopped = isinstance(error, KeyboardInterrupt | StopBySignal)
        return None if stopped else session.trainer.run_signals.stop_error()
    return watch.explain_or_report(error)


def _explain(session: Session, run: Run, error: BaseException) -> None:
    """Add to an error of the user's code where it happened, and a remedy if one is known."""
    if not isinstance(error, Exception) or isinstance(error, LoopwrightError):
        return
    add_place(error, place_of(session.trainer, run, error))
    add_nearest(error)
    if is_out_of_memory(error):
        add_place(error, _report_memory(session, run, error))
    hook = run.metrics.table.hook
    if hook in _STEPS and run.metrics.batch is not None:
        add_place(error, f"Loopwright: the batch is {shapes_of(run.metrics.batch)}")
        if hook == "predict_step" and not isinstance(run.metrics.batch, Tensor):
            _explain_default(run.module, error)
    if not isinstance(error, RuntimeError):
        return
    if "DTensor" in str(error) or "invalid python storage" in str(error):
        from ...strategies.fsdp.steps import explain

        explain(error)
    if session.verb == "fit":
        advice = advice_on(error, run.module) or advice_on_graph(error, run.module, hook)
    else:
        advice = advice_on_evaluation(error, session.verb, session.arguments.inference_mode)
    if advice is not None:
        add_place(error, advice)


def _explain_default(module: nn.Module, error: Exception) -> None:
    """Say that `forward` got all of a batch, labels included, where the module does not define `predict_step`."""
    if find_override(module, "predict_step", MODULE_BASES) is None:
        add_place(
            error,
            "Loopwright: the module has no predict_step, so its forward gets the whole batch. To fix it: define "
            "predict_step(self, batch, batch_idx), and pass to self(...) what forward expects",
        )


def _report_memory(session: Session, run: Run, error: Exception) -> str:
    """Return what holds the memory that ran out, and what takes less of it."""
    optimizers = [getattr(optimizer, "optimizer", optimizer) for optimizer in run.optimizers]
    report = memory_report(run.module, optimizers, device=run.device, error=error)
    trains = session.trainer.state.stage == "train"
    advice = advise(
        report,
        shards=session.strategy.traits.shards_parameters,
        trains=trains,
        may_shrink=trains and session.arguments.on_oom != "shrink",
    )
    text = f"Loopwright: {run.device} is out of memory; {report.summary()}\nWhat takes less: {advice}."
    total, batch = report.device.get("total"), run.metrics.batch
    if session.verb != "fit" or run.has_ranks or batch is None or total is None:  # others do not wait for a plan
        return f"{text} trainer.plan(module, data, devices=..., memory=...) shows what fits." if run.has_ranks else text
    from ..nearest_plan import nearest_that_fits

    try:
        return f"{text}\n{nearest_that_fits(session.trainer, run.module, batch, memory=total)}"
    except Exception as second:  # of the user's module, which cannot run without memory: the first error must be shown
        return f"{text} A plan of what fits failed: {type(second).__name__}: {second}"


def _notify(session: Session, run: Run, error: BaseException) -> None:
    """Notify callbacks and data module; close the loggers. A hook that fails here does not hide the first error."""
    saving = session.trainer._lw_saving
    saving.is_after_error = run.is_after_error = True
    try:
        saving.wait_after(error)
        run.metrics.table = run.metrics.nowhere
        run.lifecycle.on_exception(error)
        saving.wait_after(error)
    # The first error is raised: whatever a hook raises now is added to it as a note.
    except Exception as second:
        logger_.exception("on_exception failed after %s", type(error).__name__)
        add_place(error, f"then on_exception failed: {type(second).__name__}: {second}")
    finally:
        saving.is_after_error = run.is_after_error = False
    session.output.finalize("failed")
    if session.verb == "fit" and session.trainer.progress.total_batches:
        describe_run(session.trainer)  # an interrupted run has its timeline as well
    if session.profiler is not None:
        session.profiler.teardown(session.verb)
    session.output.send_files()
