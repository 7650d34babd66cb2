"""Full precision, and the interface that every precision has: dtypes as data, and what is done with them."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..protocols import AnyBatch, StateDict

__all__ = ["DefaultDtype", "Precision", "PrecisionPolicy", "cast_floats"]


@dataclass(frozen=True)
class PrecisionPolicy:
    """The dtypes of one precision, for strategies that cast by themselves (sharding, engines)."""

    param_dtype: torch.dtype = torch.float32
    """Of parameters as the optimizer holds them."""
    compute_dtype: torch.dtype = torch.float32
    """Of matrix products in the forward and backward pass."""
    reduce_dtype: torch.dtype = torch.float32
    """Of gradients while they are reduced over ranks."""
    buffer_dtype: torch.dtype = torch.float32
    """Of floating point buffers."""
    output_dtype: torch.dtype = torch.float32
    """Of what `Precision.convert_output` returns."""


class Precision:
    """Full precision ("32-true"): nothing is cast, scaled or entered. The base class of the others.

    The flags say which of the methods do something, so that the hot path calls no others.
    """

    precision: str = "32-true"
    """The name that users type."""
    policy: PrecisionPolicy = PrecisionPolicy()
    """The dtypes, as data."""
    has_forward_context: bool = False
    """Whether `forward_context` does something."""
    has_scaler: bool = False
    """Whether losses are scaled, so that an optimizer step can be skipped."""
    converts_input: bool = False
    """Whether `convert_input` does something."""
    converts_output: bool = False
    """Whether `Fabric.bind_step` passes what a step returns through `convert_output`."""

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Return the module with its parameters and buffers in this precision's dtypes; may change it in place."""
        return module

    def tensor_init_context(self) -> AbstractContextManager[object]:
        """Return a context in which tensors made without a dtype get this precision's."""
        return nullcontext()

    def module_init_context(self) -> AbstractContextManager[object]:
        """Return a context in which parameters are made in this precision's dtype."""
        return nullcontext()

    def forward_context(self) -> AbstractContextManager[object]:
        """Return the context in which the user's steps run: a new one for every use."""
        return nullcontext()

    def step_context(self) -> AbstractContextManager[object]:
        """Return a further context of the user's steps, entered within an engine: a new one for every use.

        For engines that leave the contexts around them before the steps run (DeepSpeed).
        """
        return nullcontext()

    def convert_input(self, data: AnyBatch) -> AnyBatch:
        """Return the data with floating point tensors in the dtype that the forward pass takes."""
        return data

    def convert_output(self, data: AnyBatch) -> AnyBatch:
        """Return the data with floating point tensors in `policy.output_dtype`; gradients flow through."""
        return data

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Return the loss to call `backward` on."""
        return loss

    def unscale_gradients(self, optimizer: Optimizer) -> None:
        """Bring the gradients of an optimizer's parameters to their true size, before they are clipped or read."""

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> bool:  # Any: a loss
        """Step the optimizer.

        Args:
            optimizer: It has gradients from `scale_loss(...).backward()`.
            closure: Computes loss and gradients again, for optimizers such as LBFGS; None for all others.

        Returns:
            Whether the step was made: False if it was skipped because a gradient is infinite or NaN.
        """
        if closure is None:
            optimizer.step()
        else:
            optimizer.step(closure)
        return True

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Raise a ConfigError if this precision does not support the optimizer."""

    def state_dict(self) -> StateDict:
        """Return the state as plain values; empty if there is none."""
        return {}

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load a state returned by `state_dict`."""

    def teardown(self) -> None:
        """End the use of this precision after a run."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.precision!r})"


class DefaultDtype:
    """A context in which torch's default dtype is another one.

    Args:
        dtype: A floating point dtype.
    """

    __slots__ = ("_before", "dtype")

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._before: list[torch.dtype] = []

    def __enter__(self) -> None:
        self._before.append(torch.get_default_dtype())
        torch.set_default_dtype(self.dtype)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        torch.set_default_dtype(self._before.pop())


def cast_floats(data: AnyBatch, dtype: torch.dtype) -> AnyBatch:
    """Return the data with each real floating point tensor cast to `dtype`.

    Mappings, lists, tuples, named tuples and dataclass instances are walked and keep their type; a container in
    which nothing changes is returned as it is. Integers, complex tensors and everything else stay.
    """
    if isinstance(data, Tensor):
        return data.to(dtype) if data.is_floating_point() else data
    if isinstance(data, Mapping):
        return _cast_mapping(data, dtype)
    if isinstance(data, (list, tuple)):
        items = [cast_floats(item, dtype) for item in data]
        if all(new is old for new, old in zip(items, data, strict=True)):
            return data
        return type(data)(*items) if hasattr(data, "_fields") else type(data)(items)
    if dataclasses.is_dataclass(data) and not isinstance(data, type):
        return _cast_dataclass(data, dtype)
    return data


def _cast_mapping(data: Mapping[object, AnyBatch], dtype: torch.dtype) -> AnyBatch:
    changed = {key: new for key, value in data.items() if (new := cast_floats(value, dtype)) is not value}
    if not changed:
        return data
    try:
        # A copy keeps what the class has beside its items (a defaultdict's factory).
        result = data.copy()  # type: ignore[attr-defined]
        result.update(changed)
    except (AttributeError, TypeError):  # a read-only mapping
        return {**data, **changed}
    return result


def _cast_dataclass(data: AnyBatch, dtype: torch.dtype) -> AnyBatch:
    changed = {}
    for field in dataclasses.fields(data):
        old = getattr(data, field.name)
        new = cast_floats(old, dtype)
        if new is not old:
            changed[field.name] = new
    if not changed:
        return data
    result = copy.copy(data)
    for name, value in changed.items():
        object.__setattr__(result, name, value)  # also for frozen ones; __post_init__ has already run
    return result
