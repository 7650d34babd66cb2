"""The optimizers and schedules of a fit: what `configure_optimizers` returns, checked and set up."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, cast

from torch import nn

from ...errors import ModuleError
from ...messages import warn
from ...strategies.optional import ChecksStates, ConfiguresOptimizers
from ..checkpointing import optimizer_record
from ..loop import manual
from ..loop.schedule import read_optimizers
from . import assemble

if TYPE_CHECKING:
    from ..run import FitRun, Run


def build_training(run: FitRun) -> None:
    """Build optimizers and schedules of a run, and the objects that watch them."""
    build_optimizers(run)
    monitored = [*run.schedulers, *run.callbacks]
    run.metrics.decisive = frozenset(str(name) for one in monitored if (name := getattr(one, "monitor", None)))
    if run.metrics.decisive:
        from .monitored import MonitoredNames

        run.monitored = MonitoredNames(run)
    if not (run.is_automatic and run.optimizers):
        from ..loop.own_steps import OwnSteps

        run.own_steps = OwnSteps(run)


def build_optimizers(run: Run) -> None:
    """Let the module make its optimizers and schedules; once per fit, and again when the tuner has set their rate."""
    module = run.module
    returned = None
    if assemble.has_override(module, "configure_optimizers"):
        try:
            configure = cast(Any, module).configure_optimizers  # Any: nn.Module lacks it
            returned = run.lifecycle.bracketed(
                configure, run.lifecycle.name_of("Module", module, "configure_optimizers")
            )()
        except ValueError as error:
            if "empty parameter list" not in str(error):
                raise
            raise _no_parameters(module) from error
    if returned is None and isinstance(run.fabric.strategy, ConfiguresOptimizers):
        returned = run.fabric.strategy.default_optimizers(module)
    if returned is None or (isinstance(returned, list | tuple) and not returned):
        warn(
            f"configure_optimizers returned {returned!r}: nothing is trained, unless training_step steps optimizers of "
            "its own, which are in no checkpoint. To train, return an optimizer"
        )
    run.optimizers, run.schedulers = read_optimizers(
        returned,
        is_automatic=run.is_automatic,
        may_be_joint=run.managed_type.may_be_joint,
        has_own_scheduler_step=assemble.has_override(module, "lr_scheduler_step"),
    )
    assemble.check_parameters(module, run.optimizers)
    if run.is_automatic and len(run.optimizers) > 1:
        assemble.check_joint(module, run.optimizers, run.fabric.strategy)
    if isinstance(run.fabric.strategy, ChecksStates):
        run.fabric.strategy.saves_optimizers = any(
            getattr(one, "save_weights_only", None) is False for one in run.trainer.callbacks
        )
    run.configured = optimizer_record.describe(run.optimizers, run.schedulers)
    if run.optimizers:
        run.optimizers = list(run.fabric.prepare_optimizers(*run.optimizers))
    manage_optimizers(run)


def manage_optimizers(run: Run) -> None:
    """Make the optimizers that the module gets."""
    step, weak = manual.step_given if run.is_automatic else manual.step_in_manual, weakref.proxy(run)
    run.managed = [
        run.managed_type(optimizer, weakref.proxy(run.trainer._lw_itself), lambda o, closure: step(weak, o, closure))
        for optimizer in run.optimizers
    ]


def _no_parameters(module: nn.Module) -> ModuleError:
    """Return the error for an optimizer without parameters, which describes those of the module."""
    parameters = list(module.parameters())
    trained = sum(one.requires_grad for one in parameters)
    if not parameters:
        has, fix = (
            "none",
            "make layers in __init__ or configure_model, as attributes; a list of layers is nn.ModuleList.",
        )
    else:
        has = f"{len(parameters)}, {trained} of them require gradients"
        fix = "pass self.parameters(), or look at what selects them in configure_optimizers."
    if parameters and not trained:
        fix = "unfreeze what is to be trained with requires_grad_(True), before the optimizer is made."
    return ModuleError(
        f"configure_optimizers makes an optimizer of no parameters; the module's parameters: {has}.", fix=fix
    )
