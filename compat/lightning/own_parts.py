"""Strategies and precisions of a program that override Lightning's methods: they are called with Lightning's arguments.

Loopwright's methods of these names take fewer arguments; here they accept Lightning's, too, so that `super()` works.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any  # Any in this file: methods of the program, and what they take and return

from torch import Tensor, nn
from torch.optim import Optimizer

from ...protocols import Closure
from ...strategies import Strategy
from .enums import GradClipAlgorithmType
from .overrides import find_own
from .precision import computed
from .strategies import EVENTS, STEPS, with_optimizer
from .utilities.part_state import state_of

if TYPE_CHECKING:
    from ...protocols import StepFunction
    from ...trainer.hooks import Hook
    from ...trainer.run import Run
    from ...trainer.trainer import Trainer

__all__ = ["call_strategy_hooks", "serve_overrides"]

_OF_PRECISION = {"pre_backward", "backward", "post_backward"}
_CLIPPING = {"clip_gradients", "clip_grad_by_norm", "clip_grad_by_value"}


def serve_overrides(trainer: Trainer) -> None:
    """Let methods that the program's strategy and precision override be called with Lightning's arguments.

    Args:
        trainer: Its strategy and precision are chosen.
    """
    # Only the objects of this Trainer have other methods; their names are checked, as those of any attribute.
    strategy, precision = trainer.fabric.strategy, trainer.fabric.precision
    own, of_precision = find_own(strategy), find_own(precision)
    if "backward" in own:
        strategy.backward = partial(_backward, trainer)  # type: ignore[method-assign]
    if "optimizer_step" in own:
        strategy.optimizer_step = partial(_optimizer_step, trainer, strategy)  # type: ignore[method-assign]
        if trainer.fabric.steps_by_precision:
            state_of(strategy).stepping_precision = precision
            trainer.fabric.steps_by_precision = False
    if own.keys() & set(STEPS):
        strategy.bind_step = partial(_bind_step, strategy, own.keys())  # type: ignore[method-assign]
    if "convert_input" in of_precision:
        strategy.bind_step = partial(_bind_converting, strategy.bind_step, precision)  # type: ignore[method-assign]
    if _OF_PRECISION & of_precision.keys():
        state_of(strategy).precision = precision
        if not own:
            strategy.backward = partial(with_optimizer(type(strategy).backward), strategy)  # type: ignore[method-assign]
    if _CLIPPING & of_precision.keys():
        by_norm, by_value = strategy.clip_gradients_norm, strategy.clip_gradients_value
        strategy.clip_gradients_norm = partial(_clip, precision, by_norm, "norm")  # type: ignore[method-assign]
        strategy.clip_gradients_value = partial(_clip, precision, by_value, "value")  # type: ignore[method-assign, assignment]
    if "optimizer_step" in of_precision:
        precision.optimizer_step = partial(_optimizer_step, trainer, precision)  # type: ignore[method-assign]


def call_strategy_hooks(run: Run) -> None:
    """Let the hooks of the program's strategy be called after those of callbacks and module.

    Args:
        run: The run that begins.
    """
    strategy = run.fabric.strategy
    for name in find_own(strategy).keys() & set(EVENTS):
        run.lifecycle.wrap(name, partial(_followed, getattr(strategy, name)))


def _followed(own: Hook, fire: Hook) -> Hook:
    def both(*arguments: Any) -> Any:
        result = fire(*arguments)
        own(*arguments)
        return result

    return both


def _backward(trainer: Trainer, tensor: Tensor, *args: Any, **kwargs: Any) -> None:
    strategy: Any = trainer.fabric.strategy
    type(strategy).backward(strategy, tensor, _optimizer_of(trainer), *args, **kwargs)


def _optimizer_of(trainer: Trainer) -> Optimizer | None:
    return next(iter(trainer.optimizers), None)


def _optimizer_step(
    trainer: Trainer, part: Any, optimizer: Optimizer, closure: Closure | None = None, **kwargs: Any
) -> bool:
    """Step by the method of the program; its closure computes nothing where that was done already."""
    state = state_of(part)
    state.has_stepped = None
    module = trainer.lightning_module
    type(part).optimizer_step(part, optimizer, closure=closure or computed, model=module, **kwargs)
    return state.has_stepped is not False


def _clip(
    precision: Any, clip: Any, algorithm: str, module: nn.Module, optimizer: Optimizer, limit: float, *others: Any
) -> Tensor:
    """Clip by the method of the program; return the norm before, or the one after where the program clips itself."""
    state = state_of(precision)
    state.run_clipping = lambda optimizer, limit: clip(module, optimizer, limit, *others)
    state.norm = None
    try:
        precision.clip_gradients(optimizer, limit, GradClipAlgorithmType(algorithm))
    finally:
        state.run_clipping = None
    norm, state.norm = state.norm, None
    gradients = (parameter.grad for group in optimizer.param_groups for parameter in group["params"])
    return nn.utils.get_total_norm([one for one in gradients if one is not None]) if norm is None else norm


def _bind_step(strategy: Strategy, own: Any, module: nn.Module, name: str) -> StepFunction:
    bound = type(strategy).bind_step(strategy, module, name)
    if name not in own:
        return bound
    state_of(strategy).bound_steps[name] = bound
    step: StepFunction = getattr(strategy, name)
    return step


def _bind_converting(bind: Any, precision: Any, module: nn.Module, name: str) -> StepFunction:
    """Bind a step whose batch, and nothing else, goes through the program's `convert_input`."""
    bound: StepFunction = bind(module, name)
    if name not in STEPS:
        return bound

    def step(batch: Any, *args: Any, **kwargs: Any) -> Any:
        return bound(precision.convert_input(batch), *args, **kwargs)

    return step
