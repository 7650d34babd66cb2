"""Shard files of a local folder, mapped into memory: what was checked is what is read.

A file that a newer save removes can be read as long as it is mapped, and no descriptor is kept open. Pages are brought
in before they are looked at, by a call that returns an error: on a bad disk, a mere look would end the process.
"""

from __future__ import annotations

import ctypes
import errno
import math
import mmap
import sys
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from ..file.digest import crc32
from .shard_file import bytes_of

_PIECE = 4 << 20
_PAGE = mmap.PAGESIZE
_WIDE_GAP = 64 << 10  # less is cheaper to read than to leave out; the system reads ahead as much
_POPULATE_READ = 22  # MADV_POPULATE_READ of Linux 5.14, which Python does not name


class MappedFile:
    """The bytes of one file.

    Args:
        content: shape (size in bytes,), uint8: private memory that the file is mapped to.
    """

    def __init__(self, content: Tensor) -> None:
        self._content = content

    def tensor(self, start: int, dtype: torch.dtype, sizes: tuple[int, ...]) -> Tensor:
        """Return the tensor that begins at a byte, in the memory of the file; nothing is read yet."""
        size_bytes = math.prod(sizes) * dtype.itemsize
        return self._content[start : start + size_bytes].view(dtype).view(sizes)

    def crc32(self, start: int, size: int) -> int:
        """Read a span of bytes and return its CRC-32.

        Raises:
            OSError: The disk cannot read them.
        """
        content, crc = bytes_of(self._content), 0
        for begin in range(start, start + size, _PIECE):
            end = min(begin + _PIECE, start + size)
            self.bring_in(self._content[begin:end])
            crc = crc32(content[begin:end], crc)
        return crc

    def bring_in(self, part: Tensor) -> None:
        """Read a part of this memory from the disk, if it has not been read yet; wide gaps are left out.

        Raises:
            OSError: The disk cannot read it, or the file was truncated.
        """
        if not part.numel():
            return
        dim = next((dim for dim, size in enumerate(part.shape) if size > 1), None)
        if dim is not None and not part.is_contiguous():
            row = part.select(dim, 0)
            if part.stride(dim) * part.element_size() - _span_bytes(row) >= _WIDE_GAP:
                for row in part.unbind(dim):
                    self.bring_in(row)
                return
        self._populate(part.data_ptr(), _span_bytes(part))

    def _populate(self, address: int, size: int) -> None:
        advise = _advise()
        assert advise is not None, "files are mapped only where pages can be brought in"
        first = address // _PAGE * _PAGE
        while advise(first, address + size - first, _POPULATE_READ):
            if ctypes.get_errno() != errno.EINTR:  # a signal came
                raise OSError(errno.EIO, "the disk cannot read it, or the file was truncated")


def map_file(path: Path, size_bytes: int) -> MappedFile | None:
    """Map a file of a known size; None if this system or this file system cannot, or it is not there."""
    if not size_bytes or _advise() is None:
        return None
    try:
        return MappedFile(torch.from_file(str(path), shared=False, size=size_bytes, dtype=torch.uint8))
    except RuntimeError:  # torch has no other error for what the system says; reading the file will report it
        return None


def _span_bytes(part: Tensor) -> int:
    """Return the number of bytes from the first to the last element of a tensor that is not empty."""
    last = sum((size - 1) * stride for size, stride in zip(part.shape, part.stride(), strict=True))
    return (last + 1) * part.element_size()


@lru_cache(maxsize=1)
def _advise() -> Callable[[int, int, int], int] | None:
    """Return the system's `madvise` if it can bring in pages and report an error, else None."""
    if not sys.platform.startswith("linux"):
        return None
    advise = ctypes.CDLL(None, use_errno=True).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    advise.restype = ctypes.c_int
    probe = torch.zeros(2 * _PAGE, dtype=torch.uint8)
    aligned = (probe.data_ptr() + _PAGE - 1) // _PAGE * _PAGE
    called: Callable[[int, int, int], int] = advise
    return called if called(aligned, _PAGE, _POPULATE_READ) == 0 else None
