"""Optimizers and schedules that a callback exchanges during a run: those of `configure_optimizers` go, others come.

Only in automatic optimization, where each rank has whole gradients and steps by itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...errors import ModuleError
from ...precision.base import evaluates_again
from ...trainer.checkpointing import optimizer_record
from ...trainer.session import assemble, begin
from .imports.absent import refuse
from .patch import patch

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from ...trainer.loop.schedule import LRSchedulerConfig
    from ...trainer.run import Run
    from ...trainer.trainer import Trainer

__all__ = ["replace_optimizers", "replace_schedules"]

# What the functions of a step know of the optimizer.
_BOUND = ("optimizer", "zero_grad", "clip", "unscale", "step_by_module")


def replace_optimizers(trainer: Trainer, optimizers: list[Optimizer]) -> None:
    """Train with other optimizers from the next step on.

    Raises:
        ModuleError: No run is active.
        NotServed: There are more or fewer than before, or the run cannot exchange them.
    """
    run = trainer.latest_run()
    if run is None:
        raise ModuleError("trainer.optimizers was assigned outside of a run.", fix="assign it in on_fit_start.")
    if len(optimizers) != len(run.optimizers):
        refuse(
            f"trainer.optimizers = {len(optimizers)} optimizers in place of {len(run.optimizers)}",
            "return all of them from configure_optimizers",
        )
    if all(new is old for new, old in zip(optimizers, run.optimizers, strict=True)):
        return
    if reason := _obstacle(run, optimizers):
        refuse(f"trainer.optimizers = other optimizers, {reason},", "return them from configure_optimizers")
    assemble.check_parameters(run.module, optimizers)
    run.optimizers = list(run.fabric.prepare_optimizers(*optimizers))
    begin.manage_optimizers(run)
    _describe(run)
    if run.plan is not None:
        fresh = assemble.make_plan(run, trainer)
        for name in _BOUND:
            patch(run.plan, name, getattr(fresh, name))
        trainer.timeline.rebind()


def replace_schedules(trainer: Trainer, configs: list[LRSchedulerConfig]) -> None:
    """Step other schedules from now on.

    Raises:
        ModuleError: No run is active.
    """
    run = trainer.latest_run()
    if run is None:
        raise ModuleError("lr_scheduler_configs was assigned outside of a run.", fix="assign it in on_fit_start.")
    run.schedulers = list(configs)
    _describe(run)


def _obstacle(run: Run, optimizers: list[Optimizer]) -> str:
    strategy = run.fabric.strategy
    if not run.is_automatic:
        return "in manual optimization"
    if strategy.holds_gradients or strategy.shards_parameters or strategy.has_stages:
        return f"with {type(strategy).__name__}"
    if strategy.accumulate_dtype is not None or run.carried is not None:
        return "with gradients that are kept beside the parameters"
    if any(evaluates_again(one) for one in (*optimizers, *run.optimizers)):
        return "with one that evaluates the model again"
    return ""


def _describe(run: Run) -> None:
    """Note what is configured now, which a resumed run compares with its own."""
    run.configured = optimizer_record.describe(run.optimizers, run.schedulers)
