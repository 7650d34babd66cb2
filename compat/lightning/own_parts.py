"""Strategies and precisions of a program that override Lightning's methods: they are called with its arguments.

Loopwright's methods of these names take fewer arguments; here they accept Lightning's, too, so that `super()` works.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial, wraps
from typing import TYPE_CHECKING, Any  # Any in this file: methods of the program, and what they take and return

from torch import Tensor, nn
from torch.optim import Optimizer

from ...lazy import home_of, is_core
from ...strategies import Strategy
from ...trainer.loop.optimizers import ManagedOptimizer
from .enums import GradClipAlgorithmType
from .overrides import find_own, is_of_program
from .patch import extend, patch
from .precision import computed

if TYPE_CHECKING:
    from ...protocols import StepFunction
    from ...trainer.hooks import Hook
    from ...trainer.run import Run
    from ...trainer.trainer import Trainer

__all__ = ["call_strategy_hooks", "serve_overrides", "set_strategy_up"]

_STEPS = ("training_step", "validation_step", "test_step", "predict_step")
_EVENTS = ("on_train_batch_start",) + tuple(
    f"on_{stage}_{moment}" for stage in ("train", "validation", "test", "predict") for moment in ("start", "end")
)
_OF_PRECISION = {"pre_backward", "backward", "post_backward"}
_CLIPPING = {"clip_gradients", "clip_grad_by_norm", "clip_grad_by_value"}


def serve_overrides(trainer: Trainer) -> None:
    """Let methods that the program's strategy and precision override be called with Lightning's arguments.

    Args:
        trainer: Its strategy and precision are chosen.
    """
    strategy, precision = trainer.fabric.strategy, trainer.fabric.precision
    own, of_precision = find_own(strategy), find_own(precision)
    for cls in type(strategy).__mro__:
        if own and is_of_program(cls):
            cls.__bases__ = tuple(map(_adapted, cls.__bases__))
    if "backward" in own:
        patch(strategy, "backward", partial(_backward, trainer))
    if "optimizer_step" in own:
        patch(strategy, "optimizer_step", partial(_optimizer_step, trainer, strategy))
        if trainer.fabric.steps_by_precision:
            strategy.__dict__["_lw_stepping_precision"] = precision
            trainer.fabric.steps_by_precision = False
    if own.keys() & set(_STEPS):
        patch(strategy, "bind_step", partial(_bind_step, strategy, own.keys()))
    if "convert_input" in of_precision:
        patch(strategy, "bind_step", partial(_bind_converting, strategy.bind_step, precision))
    if _OF_PRECISION & of_precision.keys():
        strategy.__dict__["_lw_precision_of_program"] = precision
        if not own:
            patch(strategy, "backward", partial(_with_optimizer(type(strategy).backward), strategy))
    if _CLIPPING & of_precision.keys():
        for algorithm in ("norm", "value"):
            clip = getattr(strategy, f"clip_gradients_{algorithm}")
            patch(strategy, f"clip_gradients_{algorithm}", partial(_clip, precision, clip, algorithm))
    if "optimizer_step" in of_precision:
        patch(precision, "optimizer_step", partial(_optimizer_step, trainer, precision))


def call_strategy_hooks(run: Run) -> None:
    """Let the hooks of the program's strategy be called after those of callbacks and module.

    Args:
        run: The run that begins.
    """
    strategy = run.fabric.strategy
    for name in find_own(strategy).keys() & set(_EVENTS):
        run.lifecycle.wrap(name, partial(_followed, getattr(strategy, name)))


def set_strategy_up(trainer: Trainer) -> None:
    """Call the `setup(trainer)` of the program's strategy, whose module and optimizers are there.

    Args:
        trainer: A run begins.
    """
    strategy: Any = trainer.fabric.strategy
    if "setup" in find_own(strategy):
        strategy.setup(trainer)


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
    trainer: Trainer, part: Any, optimizer: Optimizer, closure: Callable[[], Any] | None = None, **kwargs: Any
) -> bool:
    """Step by the method of the program; its closure computes nothing where that was done already."""
    own = part.__dict__
    own.pop("_lw_has_stepped", None)
    module = trainer.lightning_module
    type(part).optimizer_step(part, optimizer, closure=closure or computed, model=module, **kwargs)
    return bool(own.pop("_lw_has_stepped", True))


def _clip(
    precision: Any, clip: Any, algorithm: str, module: nn.Module, optimizer: Optimizer, limit: float, *others: Any
) -> Tensor:
    """Clip by the method of the program; return the norm before, or the one after where the program clips itself."""
    own = precision.__dict__
    own["_lw_run_clipping"] = lambda optimizer, limit: clip(module, optimizer, limit, *others)
    own["_lw_norm"] = None
    try:
        precision.clip_gradients(optimizer, limit, GradClipAlgorithmType(algorithm))
    finally:
        del own["_lw_run_clipping"]
    norm: Tensor | None = own.pop("_lw_norm")
    gradients = (parameter.grad for group in optimizer.param_groups for parameter in group["params"])
    return nn.utils.get_total_norm([one for one in gradients if one is not None]) if norm is None else norm


def _bind_step(strategy: Strategy, own: Any, module: nn.Module, name: str) -> StepFunction:
    bound = type(strategy).bind_step(strategy, module, name)
    if name not in own:
        return bound
    strategy.__dict__.setdefault("_lw_bound_steps", {})[name] = bound
    step: StepFunction = getattr(strategy, name)
    return step


def _bind_converting(bind: Any, precision: Any, module: nn.Module, name: str) -> StepFunction:
    """Bind a step whose batch, and nothing else, goes through the program's `convert_input`."""
    bound: StepFunction = bind(module, name)
    if name not in _STEPS:
        return bound

    def step(batch: Any, *args: Any, **kwargs: Any) -> Any:
        return bound(precision.convert_input(batch), *args, **kwargs)

    return step


def _make_step(name: str) -> Callable[..., Any]:
    def step(self: Strategy, *args: Any, **kwargs: Any) -> Any:
        """Run the step of the module that is trained or evaluated, in this strategy."""
        return self.__dict__["_lw_bound_steps"][name](*args, **kwargs)

    return step


for _name in _STEPS:
    extend(Strategy, _name, _make_step(_name))


def _do_nothing(self: Strategy, *arguments: Any) -> None:
    """Do nothing; a program's strategy may override it."""


def _do_nothing_with_batch(self: Strategy, batch: Any, batch_idx: int) -> None:
    """Do nothing; a program's strategy may override it."""


for _name in ("setup", *_EVENTS):
    extend(Strategy, _name, _do_nothing)
patch(Strategy, "on_train_batch_start", _do_nothing_with_batch)


@cache
def _adapted(cls: type) -> type:
    """Return a class of Loopwright as the base of a program's strategy: two methods accept Lightning's arguments."""
    if not (is_core(cls) and issubclass(cls, Strategy)):
        return cls
    methods = {"backward": _with_optimizer(cls.backward), "optimizer_step": _with_model(cls.optimizer_step)}
    metaclass: Any = type(cls)
    made: type = metaclass(cls.__name__, (cls,), {"__module__": home_of(cls), "__doc__": cls.__doc__, **methods})
    return made


def _with_optimizer(core: Any) -> Any:
    @wraps(core)
    def backward(self: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> None:
        optimizer = kwargs.pop("optimizer", None)
        if args and (args[0] is None or isinstance(args[0], Optimizer | ManagedOptimizer)):
            optimizer, *args = args  # type: ignore[assignment]
        own = self.__dict__
        precision = own.get("_lw_precision_of_program")
        if precision is None:
            core(self, tensor, *args, **kwargs)
            return
        own["_lw_precision_of_program"] = None  # another class of this strategy may define the method, too
        precision.__dict__["_lw_run_backward"] = partial(core, self)
        module = own["_lw_lightning_trainer"].lightning_module
        try:
            tensor = precision.pre_backward(tensor, module)
            precision.backward(tensor, module, optimizer, *args, **kwargs)
            precision.post_backward(tensor, module)
        finally:
            own["_lw_precision_of_program"] = precision
            del precision.__dict__["_lw_run_backward"]

    return backward


def _with_model(core: Any) -> Any:
    @wraps(core)
    def optimizer_step(
        self: Any, optimizer: Optimizer, closure: Any = None, model: nn.Module | None = None, **kwargs: Any
    ) -> Any:
        precision = self.__dict__.get("_lw_stepping_precision")
        if closure is computed and not kwargs:
            closure = None
        if precision is not None:
            has_stepped = precision.optimizer_step(optimizer, closure=closure, **kwargs)
        elif kwargs:
            optimizer.step(closure=closure, **kwargs)
            has_stepped = True
        else:
            has_stepped = core(self, optimizer, closure)
        self.__dict__["_lw_has_stepped"] = has_stepped
        return has_stepped

    return optimizer_step
