"""A device with little memory, on the CPU: what tensors take is counted, and too much is out of memory."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class ShortMemory(TorchDispatchMode):
    """Raises torch.OutOfMemoryError where the tensors that operations have made take more than there is.

    Args:
        limit_bytes: What there is for them; None: as much as they want.

    Attributes:
        most_bytes: The most that they have taken.
        errors: How often there was not enough.
    """

    def __init__(self, limit_bytes: int | None = None) -> None:
        super().__init__()
        self.limit_bytes = limit_bytes
        self.now_bytes = self.most_bytes = self.errors = 0
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for one in tree_leaves(result):
            if isinstance(one, Tensor) and type(one) is Tensor and func.namespace == "aten":
                self._count(one.untyped_storage())
        return result

    def _count(self, storage: Any) -> None:
        if storage in self._known:
            return
        size = storage.nbytes()
        if self.limit_bytes is not None and self.now_bytes + size > self.limit_bytes:
            self.errors += 1
            raise torch.OutOfMemoryError(f"Tried to allocate {size} bytes; {self.now_bytes} are in use.")
        self._known.add(storage)
        self.now_bytes += size
        self.most_bytes = max(self.most_bytes, self.now_bytes)
        weakref.finalize(storage, self._free, size)

    def _free(self, size: int) -> None:
        self.now_bytes -= size
