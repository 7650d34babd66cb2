"""Deferred initialization: a module is built without memory, and its values are computed later, unit by unit.

Strategies that shard a model enter `DeferredInit` in their `init_context`; materialize.py computes the values. Within
the context new tensors are on the meta device, and operations on them are recorded as operator_replay.py defines.

An operation that draws random numbers records the state of the generator and then draws into temporary memory. Later
code sees the same random numbers as without deferral, and the replay starts from the recorded state.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType

from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)

from .operator_replay import is_deferred
from .recording import Functions, Operations

# The attribute of a module for {name of a deferred tensor: its version when the context ended}.
_MARKS = "_loopwright_deferred"
_LOST = -1  # instead of a version: the tensor was changed where operations are not recorded

_active = threading.local()
_marked: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()  # by id


class DeferredInit:
    """A context in which tensors are created on the meta device, and the operations that fill them are recorded.

    It supports the constructors of modules, `torch.nn.init`, `deepcopy`, tied weights, tables computed for buffers, and
    `load_state_dict` into modules built in the context. Within the context a tensor reports the CPU as its device.
    Values that the code reads (`item()`, `if tensor.any():`, `tolist()`, `numpy()`) are computed immediately, and kept
    only if they are small. Tensors that torch creates from Python or NumPy values have their values immediately.

    A module built in an earlier context can be changed in a later one. A nested context only sets `empty` until it
    ends.

    Args:
        empty: Whether to draw no random numbers and leave parameters without values, for a checkpoint that is loaded
            next. Buffers that are not random still get values, because a checkpoint may not contain them.
    """

    def __init__(self, empty: bool = False) -> None:
        self.empty = empty
        self.is_inside = False  # within a torch function that was called with a deferred tensor
        self._stack = ExitStack()
        self._modules: dict[int, nn.Module] = {}

    def __enter__(self) -> DeferredInit:
        outer: DeferredInit | None = getattr(_active, "context", None)
        if outer is not None:
            self._stack.enter_context(_empty(outer, self.empty))
            return self
        for module in list(_marked.values()):
            _mark(module, changed_names(module))
        self._stack.callback(register_module_parameter_registration_hook(self._note).remove)
        self._stack.callback(register_module_buffer_registration_hook(self._note).remove)
        self._stack.enter_context(Operations(self))
        self._stack.enter_context(Functions(self))
        _active.context = self
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if getattr(_active, "context", None) is self:
            _active.context = None
            _marked.update(self._modules)
            self._modules.clear()
            for module in list(_marked.values()):
                _mark(module, _lost_names(module))
        self._stack.close()

    def _note(self, module: nn.Module, name: str, tensor: Tensor | None) -> None:
        self._modules[id(module)] = module


@contextmanager
def _empty(context: DeferredInit, empty: bool) -> Iterator[None]:
    before, context.empty = context.empty, empty
    try:
        yield
    finally:
        context.empty = before


# --- lost changes -----------------------------------------------------------------------------------------------------


def changed_names(module: nn.Module) -> set[str]:
    """Return the names of the module's deferred tensors, without its children's, that changed after the context ended.

    On the meta device such a change only increments the tensor's version, or creates a new tensor without a record
    (`module.to(dtype)`, `deepcopy`). Changes through `parameter.data` are not detected.
    """
    tensors = own_tensors(module)
    return {
        name
        for name, version in module.__dict__.get(_MARKS, {}).items()
        if (tensor := tensors.get(name)) is not None
        and tensor.is_meta
        and (not is_deferred(tensor) or tensor._version != version)
    }


def forget_marks(module: nn.Module) -> None:
    """Remove the context's marks from a module whose tensors have values."""
    module.__dict__.pop(_MARKS, None)
    _marked.pop(id(module), None)


def own_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of this module, excluding its children's."""
    tensors = {**module._parameters, **module._buffers}
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def _lost_names(module: nn.Module) -> set[str]:
    return {name for name, version in module.__dict__.get(_MARKS, {}).items() if version == _LOST}


def _mark(module: nn.Module, lost: set[str]) -> None:
    tensors = own_tensors(module).items()
    marks = {name: _LOST if name in lost else tensor._version for name, tensor in tensors if is_deferred(tensor)}
    marks |= dict.fromkeys(lost, _LOST)
    if marks:
        module.__dict__[_MARKS] = marks
    else:
        forget_marks(module)
