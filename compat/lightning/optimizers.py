"""Lightning's ways with optimizers: a callback may replace them during a run, and a module without one has a dummy.

They can be replaced only in automatic optimization, where each rank has full gradients and steps by itself. Functions
around the step of a `LightningOptimizer` are called, too: Lightning counts steps in them, and a step with other
functions does not count in `global_step`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any  # Any: what a step takes and returns

import torch
from torch.optim import Optimizer
from typing_extensions import override

from ...errors import ModuleError
from ...precision.base import evaluates_again
from ...protocols import Closure
from ...trainer.checkpointing import optimizer_record
from ...trainer.loop.optimizers import ManagedOptimizer
from ...trainer.run import FitRun
from ...trainer.session import assemble
from ...trainer.session.optimizers import manage_optimizers
from ..absent import refuse

if TYPE_CHECKING:
    from ...protocols import StateDict
    from ...trainer.loop.schedule import LRSchedulerConfig
    from ...trainer.run import Run
    from ...trainer.trainer import Trainer

__all__ = ["LightningOptimizer", "do_nothing_closure", "replace_optimizers", "replace_schedules"]


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
    manage_optimizers(run)
    _describe(run)
    if isinstance(run, FitRun) and run.is_bound:
        run.plan.take_optimizer(assemble.make_plan(run, trainer))
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
    if strategy.traits.owns_optimizers or strategy.traits.shards_parameters or strategy.traits.has_stages:
        return f"with {type(strategy).__name__}"
    if strategy.accumulate_dtype is not None or run.carried is not None:
        return "with gradients that are kept beside the parameters"
    if any(evaluates_again(one) for one in (*optimizers, *run.optimizers)):
        return "with one that evaluates the model again"
    return ""


def _describe(run: Run) -> None:
    """Record the current configuration, with which a resumed run compares its configuration."""
    run.configured = optimizer_record.describe(run.optimizers, run.schedulers)


def do_nothing_closure() -> None:
    """Compute nothing."""


class _MockOptimizer(Optimizer):
    """An optimizer of nothing; its step calls the closure."""

    def __init__(self) -> None:
        super().__init__([torch.zeros(1)], {})

    def add_param_group(self, param_group: dict[str, object]) -> None:
        """Leave it."""
        self.param_groups: list[dict[str, object]] = []

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Leave it."""

    def state_dict(self) -> StateDict:
        """Return an empty state."""
        return {}

    def step(self, closure: Closure | None = None) -> None:  # type: ignore[override]
        """Call the closure."""
        if closure is not None:
            closure()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing."""

    def __repr__(self) -> str:
        return "No Optimizer"


def _count() -> None:
    """Do nothing, where Lightning counts."""


class LightningOptimizer(ManagedOptimizer):
    """An optimizer as `self.optimizers()` returns it, with the functions that Lightning calls around its step.

    Attributes:
        uncounted: Steps with another function instead of the one that counts: `global_step` leaves them out.
    """

    may_be_joint = False  # Lightning refuses them

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.uncounted = 0
        self._on_before_step: Callable[[], object] = _count
        self._on_after_step: Callable[[], object] = _count

    @property
    def _optimizer(self) -> Optimizer:
        return self.optimizer

    @override
    def step(self, closure: Closure | None = None, **kwargs: object) -> Any:
        """Step, between the functions that a program has put around it."""
        if self._on_before_step is _count and self._on_after_step is _count:
            return super().step(closure, **kwargs)
        before = self.num_steps
        self._on_before_step()
        result = super().step(closure, **kwargs)
        self._on_after_step()
        if self._on_after_step is not _count:
            self.uncounted += self.num_steps - before
        return result

    def __repr__(self) -> str:
        return f"Lightning{self.optimizer!r}"
