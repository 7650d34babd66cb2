"""Slices of a chunk, read from an open file: as few bytes and as few requests as can be."""

from __future__ import annotations

import math
from itertools import product
from typing import IO

import torch
from torch import Tensor

from ..file.digest import crc32
from ..tensors import narrow
from .manifest import Chunk
from .shard_file import bytes_of

# Bytes are moved in dtypes of the same size, which all operations know.
RAW = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}

_PIECE = 16 << 20


def read_slice(file: IO[bytes], chunk: Chunk, within: tuple[int, ...], into: Tensor, least_run: int) -> int:
    """Read a slice of a chunk.

    Args:
        file: The shard file.
        chunk: What is read from.
        within: First index of the slice in the chunk.
        into: Receives the slice, and has its shape.
        least_run: Bytes in a row that are worth their own read.

    Returns:
        The CRC-32 of the bytes, which is the chunk's if the slice is all of it; else without meaning.
    """
    item = into.element_size()
    row_bytes = math.prod(chunk.sizes[1:]) * item
    is_whole_rows = tuple(into.shape[1:]) == chunk.sizes[1:]
    if not into.ndim or (is_whole_rows and into.is_contiguous()):
        file.seek(chunk.start + (within[0] * row_bytes if within else 0))
        return _fill_checked(file, bytes_of(into))
    run_dim = max(dim for dim in range(into.ndim) if dim == 0 or into.shape[dim] != chunk.sizes[dim])
    run_bytes = math.prod(into.shape[run_dim:]) * item
    if run_dim and run_bytes >= least_run:
        _read_runs(file, chunk, within, into, run_dim)
        return 0
    # Rows of the first dimension follow each other in the file: some at a time, with what is not wanted of them.
    crc = 0
    step = max(1, _PIECE // max(1, row_bytes))
    for row in range(0, into.shape[0], step):
        count = min(step, into.shape[0] - row)
        rows = torch.empty((count, *chunk.sizes[1:]), dtype=into.dtype)
        file.seek(chunk.start + (within[0] + row) * row_bytes)
        crc = _fill_checked(file, bytes_of(rows), crc)
        into.narrow(0, row, count).copy_(narrow(rows, (0, *within[1:]), (count, *into.shape[1:])))
    return crc


def _read_runs(file: IO[bytes], chunk: Chunk, within: tuple[int, ...], into: Tensor, run_dim: int) -> None:
    """Read a slice of a chunk run by run: the bytes that follow each other from dimension `run_dim` on."""
    strides = [math.prod(chunk.sizes[dim + 1 :]) * into.element_size() for dim in range(into.ndim)]
    base = chunk.start + sum(start * stride for start, stride in zip(within, strides, strict=True))
    buffer = torch.empty(into.shape[run_dim:], dtype=into.dtype)
    for index in product(*(range(size) for size in into.shape[:run_dim])):
        file.seek(base + sum(position * stride for position, stride in zip(index, strides, strict=False)))
        part = into[index]
        run = part if part.is_contiguous() else buffer
        fill(file, bytes_of(run))
        if run is buffer:
            part.copy_(buffer)


def _fill_checked(file: IO[bytes], target: memoryview, crc: int = 0) -> int:
    """Fill memory from a file and return its CRC-32."""
    for start in range(0, len(target), _PIECE):
        piece = target[start : start + _PIECE]
        fill(file, piece)
        crc = crc32(piece, crc)
    return crc


def fill(file: IO[bytes], target: memoryview) -> None:
    """Fill memory from a file.

    Raises:
        EOFError: It ends before.
    """
    while target:
        count = file.readinto(target)  # type: ignore[attr-defined]  # typeshed's IO lacks it
        if not count:
            raise EOFError(f"it ends {len(target)} bytes too early")
        target = target[count:]


def read_bytes(file: IO[bytes], size: int) -> bytes:
    """Return the next bytes of a file.

    Raises:
        EOFError: It ends before.
    """
    content = bytearray(size)
    fill(file, memoryview(content))
    return bytes(content)
