"""`DeferredCopies`: memory that another thread copies while training continues, with the bytes of when it was added.

torch can let two storages share memory until one is written to (`torch._lazy_clone`): whoever writes gets memory of its
own first, so the other keeps the bytes of before. Every write by an operation of torch is caught, also through `.data`
and views. Code that holds the address from before would not be: memory that NumPy has seen is therefore not shared.

    add        training thread: shares the memory, which takes microseconds
    copy       any threads: copy what is left, and wait for what others are copying
    release    training thread, before an optimizer step: as `copy`; then the memory is as it was, at the same address

Two limits of torch 2.13: resizing a storage while it is shared is an error; and a storage without an allocator, as
torch.load makes it, must not be shared.

Only `release` gives up the shared memory, never the thread that copies: in torch 2.13, a storage that is written to at
the very moment when another thread gives up the share may read memory that was freed.

Source: c10/core/impl/COW.h of torch.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from contextlib import suppress
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..checkpoint_io import before_next_step

_is_cow_tensor: Any = getattr(torch._C, "_is_cow_tensor", None)  # Any: private, so perhaps not there

# Below it, a copy costs less than to share.
_WORTH_SHARING = 1 << 18


class DeferredCopies:
    """Copies of storages on the CPU that are made later.

    Attributes:
        was_overtaken: Whether some memory was written to before `release`: each such write has allocated and copied.
    """

    def __init__(self) -> None:
        self.was_overtaken = False
        self._shares: list[_Share] = []
        self._left: deque[_Share] = deque()
        self._num_copied = 0
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._process = os.getpid()

    def __bool__(self) -> bool:
        return bool(self._shares)

    def add(self, source: torch.UntypedStorage, target: torch.UntypedStorage) -> bool:
        """Have `target` receive the bytes that `source` has now; return False if this memory must be copied at once.

        Args:
            source: On the CPU.
            target: On the CPU, of the same size; read it after `copy`.
        """
        if not is_shareable(source):
            return False
        try:
            share = _Share(source, target)
        except RuntimeError:  # it is not of torch's own allocator
            return False
        self._shares.append(share)
        self._left.append(share)
        return True

    def start(self) -> None:
        """Have the next optimizer step release the memory."""
        before_next_step.append(self.release)

    def copy(self) -> None:
        """Return when all is copied.

        Raises:
            RuntimeError: A copy failed.
        """
        while self._left:
            self._copy_next()
        with self._changed:
            self._changed.wait_for(lambda: self._num_copied == len(self._shares))
        if self._error is not None:
            raise RuntimeError(f"the state of an optimizer could not be copied: {self._error}") from self._error

    def release(self) -> None:
        """Copy what is left, and share no memory any more. Called in the thread that trains."""
        if self.release in before_next_step:
            before_next_step.remove(self.release)
        if os.getpid() == self._process:  # a fork has no thread that would finish its part
            with suppress(RuntimeError):  # the thread that writes gets it, too
                self.copy()
        shares = self._shares
        with self._changed:
            self._shares, self._num_copied = [], 0
        for share in shares:
            self.was_overtaken |= not share.is_shared()
            share.release()

    def _copy_next(self) -> None:
        try:
            share = self._left.popleft()
        except IndexError:  # another thread was quicker
            return
        try:
            share.copy()
        except BaseException as error:  # Ctrl-C, too: this copy must not pass for complete, or be waited for forever
            self._error = error
            if not isinstance(error, Exception):
                raise
        finally:
            with self._changed:
                self._num_copied += 1
                self._changed.notify_all()


class _Share:
    """One storage that shares its memory with a clone.

    Raises:
        RuntimeError: torch cannot share this memory.
    """

    def __init__(self, source: torch.UntypedStorage, target: torch.UntypedStorage) -> None:
        self._source = _bytes_of(source, 0)  # without elements: no operation on it would touch the memory
        self._clone: Tensor | None = torch._lazy_clone(self._source)
        self._target = _bytes_of(target, target.nbytes())

    def copy(self) -> None:
        """Fill the target; lets other threads run."""
        assert self._clone is not None, "it was released"
        self._target.copy_(_bytes_of(self._clone.untyped_storage(), self._target.numel()))

    def is_shared(self) -> bool:
        """Return whether nothing has been written to the source since."""
        return bool(_is_cow_tensor(self._source))

    def release(self) -> None:
        """Drop the clone, so that the source is the only owner of its memory again."""
        self._clone = None
        self._source.untyped_storage().data_ptr()  # takes the memory back: nothing is copied for the last owner


def is_shareable(storage: torch.UntypedStorage) -> bool:
    """Return whether writes to this memory can be noticed, and sharing it pays.

    A storage that cannot be resized has been seen by NumPy, or has no allocator: it was read from a file.
    """
    return storage.nbytes() >= _WORTH_SHARING and storage.resizable() and _has_sharing()


@lru_cache(maxsize=1)
def _has_sharing() -> bool:
    """Return whether this torch shares memory as it should; what does it is not public."""
    if _is_cow_tensor is None or not hasattr(torch, "_lazy_clone"):
        return False
    source = torch.zeros(16, dtype=torch.uint8)
    address = source.data_ptr()
    try:
        clone = torch._lazy_clone(source)
        is_shared = bool(_is_cow_tensor(source) and _is_cow_tensor(clone))
        source.data.fill_(1)
    except RuntimeError:
        return False
    return is_shared and source.data_ptr() != address and not clone.any() and bool(source.all())


def _bytes_of(storage: torch.UntypedStorage, size: int) -> Tensor:
    """Return the first bytes of a storage as a tensor of shape (size,)."""
    return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (size,), (1,))
