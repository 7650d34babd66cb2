"""Operator replay: records how a tensor without memory gets its values, and computes them.

Operations on meta tensors are recorded per memory (a storage of torch, which views share). A memory refers to the last
operation that wrote to it, and an operation to the memories that it read, in their state at that time. Replaying a
tensor runs the operations that it depends on, and no others, in the original order.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from ...errors import ModuleError

if TYPE_CHECKING:
    from torch._ops import OpOverload

Kwargs: TypeAlias = dict[str, Any]

# Any in this file: operations of torch, their arguments and results.

CPU = torch.device("cpu")
META = torch.device("meta")

# The attribute of a storage for its Memory. torch keeps the Python object of a storage, with its attributes, as long as
# the storage itself.
_MEMORY = "_loopwright_memory"
# The attribute of a storage with values for weak references to the constants that were taken from it.
_CONSTANTS = "_loopwright_constants"

next_time = count().__next__
_replaying = threading.local()


@dataclass(slots=True, eq=False)
class Memory:
    """A placeholder for the values of one storage on the meta device."""

    num_bytes: int
    empty: bool  # parameters on it get no values
    last_write: Operation | Constant | None = None  # None: nothing was written to it


@dataclass(frozen=True, slots=True)
class View:
    """A tensor on a memory, at the time after one of the writes to it."""

    memory: Memory
    write: Operation | Constant | None  # the last one before that time; None: the memory may hold anything
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    conj: bool
    neg: bool


@dataclass(frozen=True, slots=True, eq=False)
class Operation:
    """One call of an operation of torch."""

    time: int
    func: OpOverload
    args: Any  # Views replace deferred tensors
    kwargs: Kwargs
    made: tuple[tuple[int, View], ...]  # the results that lie in new memories, with their indices
    read: tuple[View, ...]
    rng_state: Tensor | None
    is_skipped: bool  # it draws random numbers, and `empty` was set
    default_dtype: torch.dtype


@dataclass(slots=True, eq=False, weakref_slot=True)
class Constant:
    """A tensor that already had values. They are copied only if it is changed within the context."""

    time: int
    memory: Memory
    value: Tensor  # not `source`, whose memory `source.data = ...` replaces, as in partitioning
    source: Tensor  # its version tells whether the memory was changed
    stride: tuple[int, ...]  # of the deferred tensor, which covers its memory
    version: int
    line: str  # the line of the user's code that uses it


def is_deferred(tensor: Tensor) -> bool:
    """Return whether this tensor has recorded operations that are not replayed yet."""
    return _memory_of(tensor) is not None


def view_of(tensor: Tensor, *, with_values: bool = True) -> View:
    """Return the view of a deferred tensor for `replay`; with `with_values=False`, replay only allocates memory."""
    memory = _memory_of(tensor)
    assert memory is not None
    memory.num_bytes = max(memory.num_bytes, tensor.untyped_storage().nbytes())
    return View(
        memory=memory,
        write=memory.last_write if with_values else None,
        dtype=tensor.dtype,
        size=tensor.size(),
        stride=tensor.stride(),
        offset=int(tensor.storage_offset()),
        conj=tensor.is_conj(),
        neg=tensor.is_neg(),
    )


def is_empty(tensor: Tensor) -> bool:
    """Return whether a deferred tensor was created with `empty=True`."""
    memory = _memory_of(tensor)
    return memory is not None and memory.empty


def is_replaying() -> bool:
    """Return whether this thread is replaying, so that operations must not be deferred."""
    return getattr(_replaying, "is_on", False)


def _memory_of(tensor: Tensor) -> Memory | None:
    if tensor.layout is not torch.strided or is_lazy(tensor):
        return None
    try:
        storage = tensor.untyped_storage()
    except NotImplementedError:  # tensor subclasses without a storage
        return None
    memory: Memory | None = getattr(storage, _MEMORY, None)
    return memory


def new_memory(tensor: Tensor, *, empty: bool) -> Memory:
    """Turn a meta tensor into a deferred tensor without recorded writes."""
    storage = tensor.untyped_storage()
    memory = Memory(storage.nbytes(), empty)
    setattr(storage, _MEMORY, memory)
    return memory


def constant_of(value: Tensor) -> Tensor:
    """Return a deferred tensor with the values of a real one."""
    tensor = torch.empty_like(value, device=META)
    memory = new_memory(tensor, empty=False)
    version = 0 if value.is_inference() else value._version
    constant = Constant(next_time(), memory, value.detach(), value, tensor.stride(), version, users_line())
    memory.last_write = constant
    storage = value.untyped_storage()
    earlier = [known for known in getattr(storage, _CONSTANTS, ()) if known() is not None]
    setattr(storage, _CONSTANTS, [*earlier, weakref.ref(constant)])
    return tensor


def keep_constants(written: Sequence[Tensor]) -> None:
    """Copy the constants that were taken from tensors that are about to be changed."""
    for tensor in written:
        if tensor.layout is torch.strided and not tensor.is_meta:
            for known in getattr(tensor.untyped_storage(), _CONSTANTS, ()):
                constant = known()
                if constant is not None:
                    constant.source = constant.value = constant.value.clone()
                    constant.version = constant.source._version


# --- computing --------------------------------------------------------------------------------------------------------


def replay(views: Sequence[View], device: torch.device) -> list[Tensor]:
    """Compute tensors, and the tensors that they depend on, on the CPU.

    Memory is freed, or moved to the device, after the last operation that needs it. The state of the random number
    generators does not change.

    Returns:
        Tensors on the device. Tensors on one memory share a storage, as without deferral.

    Raises:
        ModuleError: A tensor that was used as an input has been changed.
    """
    writes = sorted(writes_needed(views), key=lambda write: write.time)
    last_use: dict[Memory, int] = {}
    for at, write in enumerate(writes):
        last_use.update((memory, at) for memory in _memories(write))
    over: dict[int, list[Memory]] = defaultdict(list)
    for memory, at in last_use.items():
        over[at].append(memory)
    wanted = {view.memory for view in views}
    storages: dict[Memory, torch.UntypedStorage] = {}
    with torch.no_grad(), _generators_kept(), _for_real():
        for at, write in enumerate(writes):
            _run(write, storages)
            for memory in over[at]:
                if memory in wanted:
                    storages[memory] = _moved(storages[memory], device)
                else:
                    del storages[memory]
        return [_tensor(view, storages, device) for view in views]


def writes_needed(views: Sequence[View]) -> list[Operation | Constant]:
    """Return all writes that the tensors depend on, in no particular order."""
    todo = [view.write for view in views if view.write is not None]
    found: dict[int, Operation | Constant] = {}
    while todo:
        write = todo.pop()
        if write.time not in found:
            found[write.time] = write
            if isinstance(write, Operation):
                todo.extend(view.write for view in write.read if view.write is not None)
    return list(found.values())


def _memories(write: Operation | Constant) -> set[Memory]:
    if isinstance(write, Constant):
        return {write.memory}
    return {view.memory for view in write.read} | {view.memory for _, view in write.made}


def _run(write: Operation | Constant, storages: dict[Memory, torch.UntypedStorage]) -> None:
    if isinstance(write, Constant):
        if not write.source.is_inference() and write.source._version != write.version:
            raise ModuleError(
                f"A tensor of shape {tuple(write.value.shape)} that initializes a module at {write.line} was changed "
                "before the module was materialized.",
                fix="initialize the module with a copy: tensor.clone().",
            )
        place = (write.value.dtype, write.value.size(), write.stride, 0, False, False)
        _tensor(View(write.memory, None, *place), storages, CPU).copy_(write.value)
        return
    args, kwargs = _map_views(write.args, storages), _map_views(write.kwargs, storages)
    if write.is_skipped:
        for _, view in write.made:
            _tensor(view, storages, CPU)
        return
    if write.rng_state is not None:
        _set_rng_state(kwargs, write.rng_state)
    with _default_dtype(write.default_dtype):
        results = list(tensors_in(write.func(*args, **kwargs)))
    for at, view in write.made:
        result = results[at]
        storage = result.untyped_storage()
        fits = result.stride() == view.stride and storage.nbytes() == view.memory.num_bytes
        if fits and result.storage_offset() == view.offset:
            storages[view.memory] = storage
        else:  # the meta kernel returned another layout
            _tensor(view, storages, CPU).copy_(result)


def _map_views(values: object, storages: dict[Memory, torch.UntypedStorage]) -> Any:
    return map_leaves(lambda value: _tensor(value, storages, CPU) if isinstance(value, View) else value, values)


def _tensor(view: View, storages: dict[Memory, torch.UntypedStorage], device: torch.device) -> Tensor:
    """Return the tensor of a view; a missing memory is allocated uninitialized."""
    if view.memory not in storages:
        new = torch.empty(view.memory.num_bytes, dtype=torch.uint8, device=device)
        storages[view.memory] = new.untyped_storage()
    tensor = torch.empty(0, dtype=view.dtype, device=device)
    tensor.set_(storages[view.memory], view.offset, view.size, view.stride)
    if view.conj:
        tensor = tensor.conj()
    return torch._neg_view(tensor) if view.neg else tensor


def _moved(storage: torch.UntypedStorage, device: torch.device) -> torch.UntypedStorage:
    all_bytes = torch.empty(0, dtype=torch.uint8, device=CPU).set_(storage)
    moved: torch.UntypedStorage = all_bytes.to(device).untyped_storage()
    return moved


def _set_rng_state(kwargs: Kwargs, state: Tensor) -> None:
    """Restore the recorded random state for an operation; an explicit generator is replaced by an equal one."""
    if kwargs.get("generator") is None:
        torch.set_rng_state(state)
    else:
        kwargs["generator"] = torch.Generator()
        kwargs["generator"].set_state(state)


@contextmanager
def _for_real() -> Iterator[None]:
    """Compute values, instead of recording operations, within the context of a DeferredInit."""
    before, _replaying.is_on = is_replaying(), True
    try:
        yield
    finally:
        _replaying.is_on = before


@contextmanager
def _generators_kept() -> Iterator[None]:
    state = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(state)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    if dtype == before:
        yield
        return
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


# --- arguments of operations ------------------------------------------------------------------------------------------


def map_leaves(function: Callable[[Any], Any], values: Any) -> Any:
    """Apply a function to each value that is not a list, tuple or dict."""
    if isinstance(values, dict):
        return {key: map_leaves(function, value) for key, value in values.items()}
    if type(values) in (list, tuple):
        return type(values)(map_leaves(function, value) for value in values)
    return function(values)


def _leaves(values: object) -> Iterator[Any]:
    if isinstance(values, dict):
        values = list(values.values())
    if isinstance(values, (list, tuple)) and not isinstance(values, torch.Size):
        for value in values:
            yield from _leaves(value)
    else:
        yield values


def tensors_in(values: object) -> Iterator[Tensor]:
    """Yield the tensors among the arguments or results of an operation."""
    return (value for value in _leaves(values) if isinstance(value, Tensor))


def views_in(values: object) -> Iterator[View]:
    """Yield the views among the recorded arguments of an operation."""
    return (value for value in _leaves(values) if isinstance(value, View))


def users_line() -> str:
    """Return the innermost line of the current stack that is outside of torch and of this folder."""
    inside = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(__file__) + os.sep)
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(inside):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno} (in {frame.f_code.co_name})"
