"""`HostCopy`: a copy of a checkpoint in host memory, which background.py writes while training continues."""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from ...errors import CheckpointError
from ...protocols import StateDict
from ...strategies.distributed.shards import is_sharded
from ..plain import Trusted, Untrusted, WithObjects
from .deferred_copy import DeferredCopies

# Nothing changes these in place; a Trusted object was pickled when it was made.
_FROZEN = frozenset(
    (type(None), bool, int, float, complex, str, bytes, torch.Size, torch.dtype, torch.device, Trusted, Untrusted)
)
_PLAIN_TENSORS = frozenset((Tensor, nn.Parameter))


@dataclass(frozen=True, slots=True)
class Taken:
    """A copy of a checkpoint.

    Attributes:
        checkpoint: The copy; tensors are on the CPU, and DTensors hold this rank's local shard there.
        settle: Waits until the copy is complete; must be called before it is read, in any thread.
    """

    checkpoint: StateDict
    settle: Callable[[], None]


class HostCopy:
    """Takes copies, one after the other: the memory of the one before may be used again.

    For 200 MB on one core, new memory takes 130 ms, because the kernel clears each page at its first use; used memory
    takes 20 ms.

    States of optimizers on the CPU are copied by `Taken.settle`, in the thread that writes: usually only the optimizer
    step touches them, and Fabric waits for the copy before it. Whatever else writes to them earlier does not change
    the copy, but has to copy itself; after a copy that was overtaken like this, all is copied at once. Weights and
    buffers are copied at once: many a forward pass writes to them, and some of torch's own operations ask for memory
    to write to where they only read.

    Args:
        keeps_memory: Whether `take` may overwrite the copy before; else each has new memory.
    """

    def __init__(self, *, keeps_memory: bool) -> None:
        self._keeps_memory = keeps_memory
        self._used: list[torch.UntypedStorage] = []
        self._deferred: DeferredCopies | None = None
        self._defers = True

    def take(self, checkpoint: StateDict) -> Taken:
        """Return a copy that does not change with the checkpoint; what shared memory or was one object still does.

        Raises:
            CheckpointError: An object in it cannot be copied.
        """
        self.release()
        copier = _Copier(self._used, defers=self._defers)
        self._used = []
        copied = copier.copied(checkpoint)
        if self._keeps_memory:
            self._used = copier.used
        fence, finish = copier.fence(), copier.deferred.copy
        if copier.deferred:
            self._deferred = copier.deferred
            self._deferred.start()

        def settle() -> None:
            finish()
            fence()

        return Taken(copied, settle)

    def release(self) -> None:
        """Share no memory with the training any more. Called in the thread that trains, when the copy is complete."""
        if self._deferred is not None:
            self._deferred.release()
            self._defers = self._defers and not self._deferred.was_overtaken
            self._deferred = None

    def forget(self) -> None:
        """Release the memory."""
        self.release()
        self._used = []


class _Copier:
    """One copy under way."""

    def __init__(self, free: list[torch.UntypedStorage], *, defers: bool) -> None:
        self.used: list[torch.UntypedStorage] = []
        self.deferred = DeferredCopies()
        self._defers = defers
        self._is_in_optimizer = False
        self._free: dict[tuple[int, bool], list[torch.UntypedStorage]] = defaultdict(list)
        for storage in free:
            # A storage's own is_pinned warns in torch 2.9, of an argument that torch itself passes.
            is_pinned = torch.empty(0, dtype=torch.uint8).set_(storage).is_pinned()
            self._free[storage.nbytes(), is_pinned].append(storage)
        self._objects: dict[int, Any] = {}
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._sources: list[torch.UntypedStorage] = []  # must not be freed before the device has read them
        self._deep: dict[int, Any] = {}

    def copied(self, value: Any) -> Any:
        kind = type(value)
        if kind in _FROZEN:
            return value
        if id(value) in self._objects:
            return self._objects[id(value)]
        if kind in (dict, OrderedDict, Counter, list, WithObjects):
            return self._container(value, kind())
        if kind in (tuple, set):
            result = kind(self.copied(item) for item in value)
        elif isinstance(value, Tensor):
            result = self._tensor(value)
        else:
            result = self._other(value)
        self._objects[id(value)] = result
        return result

    def _container(self, value: Any, result: Any) -> object:
        self._objects[id(value)] = result  # before its entries: it may hold itself
        if isinstance(value, list):
            result.extend(self.copied(item) for item in value)
            return result
        is_of_optimizer = self._defers and "state" in value and "param_groups" in value
        for key, item in value.items():
            if is_of_optimizer and key == "state":
                self._is_in_optimizer = True
            result[self.copied(key)] = self.copied(item)
            if is_of_optimizer and key == "state":
                self._is_in_optimizer = False
        if type(value) is OrderedDict:  # state_dict()._metadata
            vars(result).update(self.copied(vars(value)))
        return result

    def _other(self, value: Any) -> Any:
        try:
            return copy.deepcopy(value, self._deep)
        except (TypeError, RuntimeError, AttributeError) as error:
            raise CheckpointError(
                f"a checkpoint that is saved in the background has an object of {type(value).__qualname__}, which "
                f"cannot be copied: {error}",
                fix="put tensors and plain values into the checkpoint, or save without AsyncCheckpointIO.",
            ) from error

    def _tensor(self, tensor: Tensor) -> Tensor:
        if type(tensor) in _PLAIN_TENSORS:
            result = self._local(tensor.detach())
        elif is_sharded(tensor):
            result = self._shard(tensor)
        else:
            return cast(Tensor, self._other(tensor))
        if type(tensor) is nn.Parameter:
            result = nn.Parameter(result, requires_grad=tensor.requires_grad)
        else:
            result.requires_grad_(tensor.requires_grad)
        vars(result).update(self.copied(vars(tensor)))
        return result

    def _shard(self, tensor: Any) -> Tensor:
        from torch.distributed.tensor import DTensor

        with torch.no_grad():
            local = tensor.to_local()
        # Not from_local: that would move the copy back to the mesh's device.
        made: Tensor = DTensor(self._local(local.detach()), tensor._spec, requires_grad=False)
        return made

    def _local(self, tensor: Tensor) -> Tensor:
        """Return a tensor of the same layout over copied memory; tensors that shared memory still share it."""
        has_one_storage = tensor.layout is torch.strided and not tensor.is_quantized and tensor.device.type != "meta"
        if not has_one_storage:
            return tensor.clone().cpu() if tensor.device.type != "meta" else tensor
        memory = self._storage(tensor.untyped_storage())
        result = torch.empty(0, dtype=tensor.dtype, device="cpu")
        result.set_(memory, tensor.storage_offset(), tensor.size(), tensor.stride())
        if tensor.is_conj() or tensor.is_neg():  # values that are not in memory: what torch.save notes beside it
            torch._utils.set_tensor_metadata(result, torch._utils.get_tensor_metadata(tensor))
        return result

    def _storage(self, source: torch.UntypedStorage) -> torch.UntypedStorage:
        known = self._storages.get(source._cdata)
        if known is not None:
            return known
        if source.device.type == "cuda":
            memory = self._memory(source.nbytes(), is_pinned=True)
            with torch.cuda.stream(self._stream(source.device)):
                memory.copy_(source, non_blocking=True)
            self._sources.append(source)
        else:
            memory = self._memory(source.nbytes(), is_pinned=False)
            is_deferred = self._is_in_optimizer and source.device.type == "cpu" and self.deferred.add(source, memory)
            if not is_deferred:
                memory.copy_(source)
        self._storages[source._cdata] = memory
        self.used.append(memory)
        return memory

    def _memory(self, size_bytes: int, *, is_pinned: bool) -> torch.UntypedStorage:
        free = self._free[size_bytes, is_pinned]
        if free:
            return free.pop()
        if is_pinned:  # without it, the device's copy would make the host wait
            return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True).untyped_storage()
        return torch.UntypedStorage(size_bytes)

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._streams:
            self._streams[device] = stream = torch.cuda.Stream(device)
            stream.wait_stream(torch.cuda.current_stream(device))  # the step that made these values
        return self._streams[device]

    def fence(self) -> Callable[[], None]:
        """Let the devices' next kernels wait for the copies, and return what lets a thread wait: the host does not."""
        sources, self._sources = self._sources, []
        events = []
        for device, stream in self._streams.items():
            event = stream.record_event()
            torch.cuda.current_stream(device).wait_event(event)
            events.append(event)

        def settle() -> None:
            for event in events:
                event.synchronize()
            sources.clear()

        return settle
