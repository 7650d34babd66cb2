"""What `Fabric.setup` hands out: a module, an optimizer and a schedule that run through precision and strategy."""

from __future__ import annotations

import copy
import functools
import inspect
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer

from ..data.move import apply_to_collection
from ..errors import ConfigError, ModuleError, nearest

if TYPE_CHECKING:
    from .accumulation import Window
    from .fabric import Fabric

__all__ = ["STEPS", "FabricModule", "FabricOptimizer", "FabricScheduler", "is_wrapped"]

# Any in this file: arguments and attributes of the user's own classes.

STEPS = ("training_step", "validation_step", "test_step", "predict_step")
# What the wrapper shares with the module: names of parameters, buffers and submodules are the user's own.
_SHARED = ("_parameters", "_buffers", "_non_persistent_buffers_set", "_modules")
_OWN = ("_without_fabric", "_fabric_original", "_fabric", "_fabric_forward", "_fabric_reduces", "_fabric_marked")


def is_wrapped(obj: object) -> bool:
    """Return whether this is a module, optimizer, schedule or loader as Fabric's setup methods return them."""
    return "_fabric" in getattr(obj, "__dict__", ()) and type(obj).__module__.startswith(__package__ + ".")


# -- modules ---------------------------------------------------------------------------------------------------------


class FabricModule(nn.Module):
    """A module whose forward runs in Fabric's precision and under the strategy's hooks.

    Everything else is the module's own: attributes are read and written there, and `state_dict`, `named_parameters`,
    `children` and `train` give and take what the user's module does, under the user's names.

    Args:
        bare: What the strategy returned for the module: itself, or wrapped.
        original: The module that the user wrote.
        fabric: The machine.
    """

    _without_fabric: nn.Module
    _fabric_original: nn.Module
    _fabric: Fabric
    _fabric_marked: set[str]
    _fabric_forward: Callable[..., object]
    _fabric_reduces: bool

    def __init__(self, bare: nn.Module, original: nn.Module, fabric: Fabric) -> None:
        super().__init__()
        own = self.__dict__
        del own["training"]  # the original's is the one
        for name in _SHARED:
            own[name] = original.__dict__[name]
        own["_without_fabric"], own["_fabric_original"], own["_fabric"] = bare, original, fabric
        own["_fabric_marked"] = {name for name in STEPS if callable(getattr(original, name, None))}
        own["_fabric_forward"] = fabric._bind_call(bare, "forward")
        own["_fabric_reduces"] = fabric.strategy.unwrap(bare) is not bare
        for name, method in inspect.getmembers(type(original), inspect.isroutine):
            # What the user's class overrides must not be hidden by nn.Module's, which this class inherits.
            inherited = getattr(nn.Module, name, None)
            is_other = inherited is not None and method is not inherited
            if is_other and not name.startswith("__") and name not in FabricModule.__dict__:
                own[name] = getattr(original, name)

    @property
    def module(self) -> nn.Module:
        """The module that the user wrote."""
        return self._fabric_original

    def forward(self, *args: Any, **kwargs: object) -> object:
        """Run the module's forward in the precision and under the strategy's hooks."""
        return self._fabric_forward(*args, **kwargs)

    def mark_forward_method(self, method: str | Callable[..., object]) -> None:
        """Let another method run in the precision and under the strategy's hooks when it is called on this object.

        `training_step`, `validation_step`, `test_step` and `predict_step` do so from the start.

        Args:
            method: A method of the module, or its name.

        Raises:
            ConfigError: It is `forward`, which always does.
            AttributeError: The module has no such method.
            ModuleError: It is not a method.
        """
        name = method if isinstance(method, str) else getattr(method, "__name__", None)
        if not isinstance(name, str) or not (isinstance(method, str) or callable(method)):
            raise ModuleError(
                f"mark_forward_method was given {method!r}.", fix="pass a method of the module, or its name."
            )
        if name == "forward":
            raise ConfigError(
                "mark_forward_method was given 'forward', which runs through the strategy always.",
                fix="leave the call out.",
            )
        if not hasattr(self._fabric_original, name):
            hint = nearest(name, [known for known in dir(self._fabric_original) if not known.startswith("_")])
            raise AttributeError(f"{type(self._fabric_original).__name__} has no method {name!r}{hint}")
        if not callable(getattr(self._fabric_original, name)):
            raise ModuleError(
                f"mark_forward_method was given {name!r}: {type(self._fabric_original).__name__} has no such method.",
                fix="pass the name of a method.",
            )
        self._fabric_marked.add(name)

    # -- as the original does --------------------------------------------------------------------------------

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state of the module that the user wrote."""
        return self._fabric_original.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> object:
        """Load the state of the module that the user wrote."""
        return self._fabric_original.load_state_dict(*args, **kwargs)

    def train(self, mode: bool = True) -> FabricModule:
        """Set training mode for the module and what the strategy put around it."""
        self._without_fabric.train(mode)
        return self

    def eval(self) -> FabricModule:
        """Set evaluation mode."""
        self._without_fabric.train(False)
        self._fabric_original.eval()  # which the user's class may define
        return self

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the module that the user wrote, in place, as `torch.nn.Module.compile` does."""
        self._fabric_original.compile(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name in _OWN or "_fabric_original" not in self.__dict__:
            raise AttributeError(name)
        if name in self._fabric_marked:
            bound = self.__dict__[name] = self._fabric._bind_call(self._without_fabric, name)
            return bound
        value = getattr(self._fabric_original, name)
        if self._fabric_reduces and inspect.ismethod(value) and value.__self__ is self._fabric_original:
            return self._guarded(value)
        return value

    def __setattr__(self, name: str, value: object) -> None:
        if name in _OWN or "_fabric_original" not in self.__dict__:
            object.__setattr__(self, name, value)
        else:
            self.__dict__.pop(name, None)  # a step that was bound before
            setattr(self._fabric_original, name, value)

    def __delattr__(self, name: str) -> None:
        self.__dict__.pop(name, None)
        delattr(self._fabric_original, name)

    def __dir__(self) -> list[str]:
        return sorted({*dir(type(self)), *dir(self._fabric_original)})

    def __deepcopy__(self, memo: dict[int, Any]) -> FabricModule:
        bare, original = copy.deepcopy((self._without_fabric, self._fabric_original), memo)
        copied = FabricModule(bare, original, self._fabric)
        copied._fabric_marked.update(self._fabric_marked)
        return copied

    def _guarded(self, method: Callable[..., object]) -> Callable[..., object]:
        """Return the method, with an error if it runs a forward whose gradients the strategy would not see."""

        @functools.wraps(method)
        def call(*args: Any, **kwargs: object) -> object:
            if not torch.is_grad_enabled():
                return method(*args, **kwargs)  # nothing to reduce

            def refuse(module: nn.Module, inputs: object) -> None:
                if torch.is_grad_enabled() and any(module is own for own in self._fabric_original.modules()):
                    raise ModuleError(
                        f"{type(self._fabric_original).__name__}.{method.__name__} ran a forward pass outside of the "
                        f"strategy {type(self._fabric.strategy).__name__}, which would not reduce its gradients.",
                        fix=f"call model.mark_forward_method({method.__name__!r}) after setup, or call the model "
                        "itself.",
                    )

            handle = register_module_forward_pre_hook(refuse)
            try:
                return method(*args, **kwargs)
            finally:
                handle.remove()

        return call


def demand_scaled_backward(output: object, fabric: Fabric) -> object:
    """Return a forward's output, on whose tensors a backward pass without Fabric's loss scale is an error."""

    def check(gradient: Tensor) -> None:
        if not fabric._is_in_backward:
            raise ModuleError(
                f"a backward pass was made without the loss scale of precision={fabric.precision.precision!r}; the "
                "next step would divide by it.",
                fix="call fabric.backward(loss) instead of loss.backward().",
            )

    def add(tensor: Tensor) -> Tensor:
        if tensor.requires_grad:
            tensor.register_hook(check)
        return tensor

    return apply_to_collection(output, Tensor, add)


# -- optimizers ------------------------------------------------------------------------------------------------------


class FabricOptimizer:
    """An optimizer whose `step` goes through precision and strategy. Everything else is the wrapped optimizer's.

    `isinstance(wrapped, torch.optim.Adam)` is true for a wrapped Adam, so that schedules can be built on it.

    Args:
        optimizer: The user's optimizer, as the strategy returned it.
        fabric: The machine.

    Attributes:
        has_stepped: Whether the last `step` was made; False where it was skipped because a loss scale overflowed. None
            before the first. A step that `Fabric.accumulate` puts off changes nothing.
        num_steps: How many were made.
    """

    _without_fabric: Optimizer
    _fabric: Fabric
    has_stepped: bool | None
    num_steps: int

    def __init__(self, optimizer: Optimizer, fabric: Fabric) -> None:
        self.__dict__.update(
            _without_fabric=optimizer, _fabric=fabric, _done=None, _refused=None, has_stepped=None, num_steps=0
        )

    @classmethod
    def of(cls, optimizer: Optimizer, fabric: Fabric) -> FabricOptimizer:
        """Return the optimizer wrapped, in a class that is named for it."""
        named: type[FabricOptimizer] = type(f"Fabric{type(optimizer).__name__}", (cls,), {"__module__": __name__})
        return named(optimizer, fabric)

    @property
    def optimizer(self) -> Optimizer:
        """The user's optimizer."""
        return self._without_fabric

    @property  # type: ignore[misc]  # typeshed's __class__ can be assigned; isinstance() asks this one
    def __class__(self) -> Any:
        return type(self._without_fabric)

    def step(self, closure: Callable[[], Any] | None = None) -> object:
        """Step the optimizer through precision and strategy; within an open window of `accumulate`, do nothing.

        Args:
            closure: Evaluates the model and returns the loss, for optimizers that call it.

        Returns:
            The closure's first loss; None without one, or if nothing was done.
        """
        fabric = self._fabric
        window = fabric._window
        if window is not None and not window.is_last and self._waits(window):
            return None
        loss: list[Any] = []

        def keep() -> Any:
            assert closure is not None
            loss.append(closure())
            return loss[-1]

        has_stepped = fabric.optimizer_step(self._without_fabric, keep if closure is not None else None)
        own = self.__dict__
        own["has_stepped"], own["_done"] = has_stepped, window
        own["num_steps"] += has_stepped
        if fabric.callbacks:
            fabric.call("on_after_optimizer_step", strategy=fabric.strategy, optimizer=self._without_fabric)
        return loss[0] if loss else None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients, unless they belong to a window of `accumulate` for which this optimizer has not stepped."""
        window = self._fabric._window
        if window is not None and window.has_gradients and self.__dict__["_done"] is not window:
            return
        self._without_fabric.zero_grad(set_to_none)
        strategy = self._fabric.strategy
        if strategy.shards_parameters:  # gradients that were not reduced yet are not in the optimizer's sight
            strategy.discard_gradients_of(self._without_fabric)

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state."""
        return self._fabric.strategy.optimizer_state(self._without_fabric)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Put back what `state_dict` returned."""
        self._fabric.strategy.load_optimizer_state(self._without_fabric, state_dict)

    def _waits(self, window: Window) -> bool:
        """Return whether the step is put off; not twice for one micro-batch: then the loop has left the window."""
        own = self.__dict__
        at = (window, window.index)
        if own["_refused"] != at:
            own["_refused"] = at
            return True
        warnings.warn(
            f"a window of fabric.accumulate was left open after {window.index} of {window.size} micro-batches, and "
            "the optimizer steps outside of it; the gradients of the window are part of this step.",
            stacklevel=3,
        )
        self._fabric._drop_window()
        return False

    def __getattr__(self, name: str) -> Any:
        if "_without_fabric" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.__dict__["_without_fabric"], name)

    def __setattr__(self, name: str, value: object) -> None:
        if name == "step":  # torch's schedules wrap it to see that it is called
            self.__dict__[name] = value
        else:
            setattr(self._without_fabric, name, value)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._without_fabric!r})"


class FabricScheduler:
    """A schedule that steps when its optimizer does. Everything else is the wrapped schedule's.

    Within an open window of `accumulate`, and after an overflow of a loss scale when nothing was learned since the
    last call, `step` does nothing.

    Args:
        scheduler: The user's schedule.
        optimizers: Those that were set up with it.
        fabric: The machine.
    """

    _without_fabric: Any
    _fabric: Fabric

    def __init__(self, scheduler: object, optimizers: list[FabricOptimizer], fabric: Fabric) -> None:
        self.__dict__.update(_without_fabric=scheduler, _fabric=fabric, _optimizers=optimizers, _seen=0)

    @property
    def scheduler(self) -> Any:
        """The user's schedule."""
        return self._without_fabric

    @property  # type: ignore[misc]  # see FabricOptimizer
    def __class__(self) -> Any:
        return type(self._without_fabric)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step the schedule, if a step of the optimizer is to be followed."""
        window = self._fabric._window
        if window is not None and not window.is_last:
            return
        own = self.__dict__
        optimizers: list[FabricOptimizer] = own["_optimizers"]
        seen = sum(optimizer.num_steps for optimizer in optimizers)
        overflowed = any(optimizer.has_stepped is False for optimizer in optimizers)
        if overflowed and seen == own["_seen"]:
            return
        own["_seen"] = seen
        self._without_fabric.step(*args, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        """Return the schedule's state."""
        state: dict[str, Any] = self._without_fabric.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Put back what `state_dict` returned."""
        self._without_fabric.load_state_dict(state_dict)

    def __getattr__(self, name: str) -> Any:
        if "_without_fabric" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.__dict__["_without_fabric"], name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self._without_fabric, name, value)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._without_fabric!r})"
