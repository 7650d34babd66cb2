"""Wrappers that `Fabric.setup` returns: modules, optimizers and schedules that use the precision and the strategy."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer

from ..data.move import apply_to_collection
from ..errors import ConfigError, ModuleError, nearest
from ..lazy import is_core
from ..messages import warn
from ..protocols import StateDict, StepOutput

if TYPE_CHECKING:
    from .accumulation import Window
    from .fabric import Fabric

# Any in this file: arguments and attributes of user-defined classes.

STEPS = ("training_step", "validation_step", "test_step", "predict_step")
# Shared by wrapper and module, so that parameters, buffers and submodules keep their names.
_SHARED = ("_parameters", "_buffers", "_non_persistent_buffers_set", "_modules")
_OWN = ("_without_fabric", "_fabric_original", "_fabric", "_fabric_forward", "_fabric_reduces", "_fabric_marked")


def is_wrapped(obj: object) -> bool:
    """Return whether this is a module, optimizer, schedule or loader returned by one of Fabric's setup methods."""
    return "_fabric" in getattr(obj, "__dict__", ()) and is_core(type(obj))


# -- modules ---------------------------------------------------------------------------------------------------------


class FabricModule(nn.Module):
    """A module whose forward runs in Fabric's precision and under the strategy's hooks.

    Everything else is delegated to the user's module: attributes are read and written there, and `state_dict`,
    `named_parameters`, `children` and `train` behave as they do on it, with the same names.

    Args:
        bare: The module as the strategy returned it, possibly wrapped.
        original: The user's module.
        fabric: The Fabric that set it up.
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
        del own["training"]  # the original's attribute is used
        for name in _SHARED:
            own[name] = original.__dict__[name]
        own["_without_fabric"], own["_fabric_original"], own["_fabric"] = bare, original, fabric
        own["_fabric_marked"] = {name for name in STEPS if callable(getattr(original, name, None))}
        own["_fabric_forward"] = fabric.bind_call(bare, "forward")
        own["_fabric_reduces"] = fabric.strategy.unwrap(bare) is not bare
        for name, method in inspect.getmembers(type(original), inspect.isroutine):
            # Overrides in the user's class must not be hidden by the methods that this class inherits from nn.Module.
            inherited = getattr(nn.Module, name, None)
            is_other = inherited is not None and method is not inherited
            if is_other and not name.startswith("__") and name not in FabricModule.__dict__:
                own[name] = getattr(original, name)

    @property
    def module(self) -> nn.Module:
        """The user's module."""
        return self._fabric_original

    def forward(self, *args: Any, **kwargs: object) -> object:
        """Run the module's forward in the precision and under the strategy's hooks."""
        return self._fabric_forward(*args, **kwargs)

    def mark_forward_method(self, method: str | Callable[..., object]) -> None:
        """Run another method in Fabric's precision and under the strategy's hooks when it is called on this object.

        `training_step`, `validation_step`, `test_step` and `predict_step` are already marked.

        Args:
            method: A method of the module, or its name.

        Raises:
            ConfigError: The method is `forward`, which is always marked.
            AttributeError: The module has no such method.
            ModuleError: The attribute is not a method.
        """
        name = method if isinstance(method, str) else getattr(method, "__name__", None)
        if not isinstance(name, str) or not (isinstance(method, str) or callable(method)):
            raise ModuleError(
                f"Expected a method of the module or its name for mark_forward_method, got {method!r}.",
                fix="pass for example model.mark_forward_method('generate').",
            )
        if name == "forward":
            raise ConfigError(
                "Expected a method other than 'forward' for mark_forward_method, because forward always runs through "
                "the strategy.",
                fix="remove the call.",
            )
        if not hasattr(self._fabric_original, name):
            hint = nearest(name, [known for known in dir(self._fabric_original) if not known.startswith("_")])
            raise AttributeError(f"{type(self._fabric_original).__name__} has no method {name!r}{hint}")
        if not callable(getattr(self._fabric_original, name)):
            raise ModuleError(
                f"Expected the name of a method of {type(self._fabric_original).__name__} for mark_forward_method, got "
                f"{name!r}, which is not callable.",
                fix="pass the name of a method.",
            )
        self._fabric_marked.add(name)

    # -- delegated to the original --------------------------------------------------------------------------------

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state of the user's module."""
        return self._fabric_original.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> object:
        """Load the state of the user's module."""
        return self._fabric_original.load_state_dict(*args, **kwargs)

    def train(self, mode: bool = True) -> FabricModule:
        """Set training mode for the module and the strategy's wrapper."""
        self._without_fabric.train(mode)
        return self

    def eval(self) -> FabricModule:
        """Set evaluation mode."""
        self._without_fabric.train(False)
        self._fabric_original.eval()  # may be overridden by the user's class
        return self

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the user's module in place, as `torch.nn.Module.compile` does."""
        self._fabric_original.compile(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name in _OWN or "_fabric_original" not in self.__dict__:
            raise AttributeError(name)
        if name in self._fabric_marked:
            bound = self.__dict__[name] = self._fabric.bind_call(self._without_fabric, name)
            return bound
        if name in ("device", "dtype") and not hasattr(self._fabric_original, name):
            return self._first_parameter(name)
        value = getattr(self._fabric_original, name)
        if self._fabric_reduces and inspect.ismethod(value) and value.__self__ is self._fabric_original:
            return self._guarded(value)
        return value

    def __setattr__(self, name: str, value: object) -> None:
        if name in _OWN or "_fabric_original" not in self.__dict__:
            object.__setattr__(self, name, value)
        else:
            self.__dict__.pop(name, None)  # remove a previously bound step
            setattr(self._fabric_original, name, value)

    def __delattr__(self, name: str) -> None:
        self.__dict__.pop(name, None)
        delattr(self._fabric_original, name)

    def __dir__(self) -> list[str]:
        return sorted({*dir(type(self)), *dir(self._fabric_original)})

    def __deepcopy__(self, memo: dict[int, Any]) -> FabricModule:
        bare, original = copy.deepcopy((self._without_fabric, self._fabric_original), memo)
        copied = self._fabric.wrap_module(bare, original)
        copied._fabric_marked.update(self._fabric_marked)
        return copied

    def _first_parameter(self, name: str) -> torch.device | torch.dtype:
        """Return the device of the first parameter or buffer, or the dtype of the first that is floating."""
        tensors = chain(self._fabric_original.parameters(), self._fabric_original.buffers())
        if name == "device":
            return next((tensor.device for tensor in tensors), self._fabric.device)
        return next((tensor.dtype for tensor in tensors if tensor.is_floating_point()), torch.get_default_dtype())

    def _guarded(self, method: Callable[..., object]) -> Callable[..., object]:
        """Return the method with a check for forward passes whose gradients the strategy would not reduce."""

        @functools.wraps(method)
        def call(*args: Any, **kwargs: object) -> object:
            if not torch.is_grad_enabled():
                return method(*args, **kwargs)  # nothing to reduce

            def refuse(module: nn.Module, inputs: object) -> None:
                if torch.is_grad_enabled() and any(module is own for own in self._fabric_original.modules()):
                    raise ModuleError(
                        f"{type(self._fabric_original).__name__}.{method.__name__} ran a forward pass outside "
                        f"{type(self._fabric.strategy).__name__}, which would not reduce the gradients.",
                        fix=f"call model.mark_forward_method({method.__name__!r}) after setup, or call model(...) "
                        "instead.",
                    )

            handle = register_module_forward_pre_hook(refuse)
            try:
                return method(*args, **kwargs)
            finally:
                handle.remove()

        return call


def demand_scaled_backward(output: StepOutput, fabric: Fabric) -> object:
    """Return a forward's output with hooks that raise an error if a backward pass does not use Fabric's loss scale."""

    def check(gradient: Tensor) -> None:
        if not fabric._is_in_backward:
            raise ModuleError(
                f"Expected a backward pass with the loss scale of precision={fabric.precision.precision!r}, got one "
                "without it. The next step would divide the gradients by this scale.",
                fix="call fabric.backward(loss) instead of loss.backward().",
            )

    def add(tensor: Tensor) -> Tensor:
        if tensor.requires_grad:
            tensor.register_hook(check)
        return tensor

    return apply_to_collection(output, Tensor, add)


# -- optimizers ------------------------------------------------------------------------------------------------------


class FabricOptimizer:
    """An optimizer whose `step` uses the precision and the strategy. Everything else is delegated to the optimizer.

    `isinstance(wrapped, torch.optim.Adam)` is true for a wrapped Adam, so that schedules can be built on it.

    Args:
        optimizer: The user's optimizer, as the strategy returned it.
        fabric: The Fabric that set it up.

    Attributes:
        has_stepped: Whether the last `step` updated parameters; False if it was skipped because gradients overflowed.
            None before the first. A step that `Fabric.accumulate` defers does not change it.
        num_steps: Number of steps that updated parameters.
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
        """Return the wrapped optimizer, as an instance of a class named after it."""
        named: type[FabricOptimizer] = type(f"Fabric{type(optimizer).__name__}", (cls,), {"__module__": __name__})
        return named(optimizer, fabric)

    @property
    def optimizer(self) -> Optimizer:
        """The user's optimizer."""
        return self._without_fabric

    @property  # type: ignore[misc]  # typeshed's __class__ can be assigned; isinstance() reads this one
    def __class__(self) -> Any:
        return type(self._without_fabric)

    def step(self, closure: Callable[[], Any] | None = None) -> object:
        """Step the optimizer with precision and strategy. Before the last micro-batch of `accumulate`, do nothing.

        Args:
            closure: Evaluates the model and returns the loss, for optimizers that call it.

        Returns:
            The closure's first loss; None without a closure, or if the step was deferred.
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
        fabric._is_accumulating = False
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
        if strategy.traits.shards_parameters:  # the optimizer has no access to gradients that are not reduced yet
            strategy.discard_gradients(None, self._without_fabric)

    def state_dict(self) -> StateDict:
        """Return the optimizer's state."""
        return self._fabric.strategy.optimizer_state(self._without_fabric)

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load a state returned by `state_dict`."""
        self._fabric.strategy.load_optimizer_state(self._without_fabric, state_dict)

    def _waits(self, window: Window) -> bool:
        """Return whether the step is deferred. A second step in one micro-batch is not, as the loop has left the
        window."""
        own = self.__dict__
        at = (window, window.index)
        if own["_refused"] != at:
            own["_refused"] = at
            return True
        warn(
            f"The optimizer stepped outside fabric.accumulate after {window.index} of {window.size} micro-batches of "
            "an accumulation window. The accumulated gradients are included in this step."
        )
        self._fabric._drop_window()
        return False

    def __getattr__(self, name: str) -> Any:
        if "_without_fabric" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.__dict__["_without_fabric"], name)

    def __setattr__(self, name: str, value: object) -> None:
        if name == "step":  # torch's schedules wrap it to detect calls
            self.__dict__[name] = value
        else:
            setattr(self._without_fabric, name, value)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._without_fabric!r})"


class FabricScheduler:
    """A schedule that steps when its optimizer does. Everything else is delegated to the schedule.

    `step` does nothing before the last micro-batch of `accumulate`, and if gradient overflows skipped all optimizer
    steps since the last call.

    Args:
        scheduler: The user's schedule.
        optimizers: The optimizers that were set up with it.
        fabric: The Fabric that set it up.
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
        """Step the schedule if an optimizer has stepped since the last call."""
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

    def state_dict(self) -> StateDict:
        """Return the schedule's state."""
        state: StateDict = self._without_fabric.state_dict()
        return state

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load a state returned by `state_dict`."""
        self._without_fabric.load_state_dict(state_dict)

    def __getattr__(self, name: str) -> Any:
        if "_without_fabric" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.__dict__["_without_fabric"], name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self._without_fabric, name, value)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._without_fabric!r})"
