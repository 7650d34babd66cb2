"""Strategies with the additional members of Lightning's; a program's strategy is derived from one of them.

Loopwright's methods of the same names take fewer arguments; here `backward` and `optimizer_step` accept Lightning's,
too, so that `super()` works.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer

from ... import strategies
from ...strategies import ModelParallelStrategy, Strategy
from ...trainer.loop.optimizers import ManagedOptimizer
from .connectors import of_trainer
from .imports.served import serve, served
from .optimizers import replace_optimizers, replace_schedules
from .precision import computed, serve_precision
from .utilities.part_state import state_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from ...trainer.loop.schedule import LRSchedulerConfig
    from ...trainer.trainer import Trainer

__all__ = ["EVENTS", "STEPS", "FabricModelParallelStrategy", "serve_parts", "served_strategy", "with_optimizer"]

S = TypeVar("S", bound=Strategy)

# Any in this file: arguments that are passed on, and what methods of a program take and return.

STEPS = ("training_step", "validation_step", "test_step", "predict_step")
EVENTS = ("on_train_batch_start",) + tuple(
    f"on_{stage}_{moment}" for stage in ("train", "validation", "test", "predict") for moment in ("start", "end")
)


def __getattr__(name: str) -> Any:  # Any: a class of strategies
    core = getattr(strategies, name, None)
    if not (isinstance(core, type) and issubclass(core, Strategy)):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return served_strategy(core)


def served_strategy(core: type[S]) -> type[S]:
    """Return a class of strategies with Lightning's members.

    Args:
        core: A class of the core.
    """
    steps = {name: _make_step(name) for name in STEPS}
    methods = {"backward": with_optimizer(core.backward), "optimizer_step": _with_model(core.optimizer_step)}
    return served(core, {**_MEMBERS, **steps, **methods}, __name__)


def serve_parts(trainer: Trainer) -> None:
    """Let strategy and precision of a trainer have Lightning's members, and the strategy know the trainer.

    Args:
        trainer: They are chosen.
    """
    strategy = trainer.fabric.strategy
    serve(strategy, served_strategy)
    serve_precision(trainer.fabric)
    state_of(strategy).trainer = trainer


def _get_optimizers(strategy: Strategy) -> list[Optimizer]:
    """The optimizers of the trainer whose strategy this is, where a program of Lightning made that trainer."""
    own = state_of(strategy).optimizers
    found: list[Optimizer] = of_trainer(strategy, "optimizers") if own is None else own
    return found


def _set_optimizers(strategy: Strategy, optimizers: list[Optimizer]) -> None:
    state = state_of(strategy)
    if state.trainer is None:
        state.optimizers = optimizers
    else:
        replace_optimizers(state.trainer, optimizers)


def _get_schedules(strategy: Strategy) -> list[LRSchedulerConfig]:
    """The schedules of the trainer whose strategy this is, where a program of Lightning made that trainer."""
    trainer = state_of(strategy).trainer
    return [] if trainer is None else list(trainer.lr_scheduler_configs)


def _set_schedules(strategy: Strategy, configs: list[LRSchedulerConfig]) -> None:
    trainer = state_of(strategy).trainer
    if trainer is not None:
        replace_schedules(trainer, configs)


def _set_module(strategy: Strategy, module: nn.Module | None) -> None:
    trainer = state_of(strategy).trainer
    if trainer is not None:
        trainer.attach_module(module)


def _make_step(name: str) -> Callable[..., Any]:
    def step(self: Strategy, *args: Any, **kwargs: Any) -> Any:
        """Run the step of the module that is trained or evaluated, in this strategy."""
        return state_of(self).bound_steps[name](*args, **kwargs)

    return step


def _do_nothing(self: Strategy, *arguments: Any) -> None:
    """Do nothing; a program's strategy may override it."""


def _do_nothing_with_batch(self: Strategy, batch: Any, batch_idx: int) -> None:
    """Do nothing; a program's strategy may override it."""


_MEMBERS: dict[str, object] = {
    **dict.fromkeys(EVENTS, _do_nothing),
    "on_train_batch_start": _do_nothing_with_batch,
    "__getattr__": of_trainer,
    "optimizers": property(_get_optimizers, _set_optimizers),
    "lr_scheduler_configs": property(_get_schedules, _set_schedules),
    "_lightning_module": property(lambda strategy: of_trainer(strategy, "lightning_module"), _set_module),
}


def with_optimizer(core: Any) -> Any:
    """Return a method `backward` that accepts Lightning's optimizer, and runs the precision of a program.

    Args:
        core: The method of the core.
    """

    @wraps(core)
    def backward(self: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> None:
        optimizer = kwargs.pop("optimizer", None)
        if args and (args[0] is None or isinstance(args[0], Optimizer | ManagedOptimizer)):
            optimizer, *args = args  # type: ignore[assignment]
        state = state_of(self)
        precision, trainer = state.precision, state.trainer
        if precision is None or trainer is None:
            core(self, tensor, *args, **kwargs)
            return
        state.precision = None  # another class of this strategy may define the method, too
        state_of(precision).run_backward = partial(core, self)
        module = trainer.lightning_module
        try:
            tensor = precision.pre_backward(tensor, module)
            precision.backward(tensor, module, optimizer, *args, **kwargs)
            precision.post_backward(tensor, module)
        finally:
            state.precision = precision
            state_of(precision).run_backward = None

    return backward


def _with_model(core: Any) -> Any:
    @wraps(core)
    def optimizer_step(
        self: Any, optimizer: Optimizer, closure: Any = None, model: nn.Module | None = None, **kwargs: Any
    ) -> Any:
        state = state_of(self)
        if closure is computed and not kwargs:
            closure = None
        if state.stepping_precision is not None:
            has_stepped = state.stepping_precision.optimizer_step(optimizer, closure=closure, **kwargs)
        elif kwargs:
            optimizer.step(closure=closure, **kwargs)
            has_stepped = True
        else:
            has_stepped = core(self, optimizer, closure)
        state.has_stepped = has_stepped
        return has_stepped

    return optimizer_step


class FabricModelParallelStrategy(ModelParallelStrategy):
    """`lw.strategies.ModelParallelStrategy`, whose first argument is the function that parallelizes in Fabric."""

    def __init__(
        self,
        parallelize_fn: Callable[[nn.Module, DeviceMesh], nn.Module],
        data_parallel_size: int | str = "auto",
        tensor_parallel_size: int | str = "auto",
        *args: Any,
        **kwargs: Any,
    ) -> None:
        super().__init__(data_parallel_size, tensor_parallel_size, *args, parallelize_fn=parallelize_fn, **kwargs)
