"""Shard files: safetensors, written as a stream.

A file is 8 bytes of header length, a JSON header padded with spaces, and the bytes of the tensors without a gap, by
falling element size, so that each is aligned. A dtype that safetensors does not know everywhere is
stored as bytes (U8); the manifest has the true one.
"""

from __future__ import annotations

import ctypes
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..file.digest import crc32

_ALIGNMENT = 64
_PIECE = 4 << 20

NAMES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.float32: "F32",
    torch.int64: "I64",
    torch.uint64: "U64",
    torch.float64: "F64",
}


class Sink(Protocol):
    """Destination of a shard: a file on disk or of a remote store."""

    def write(self, data: memoryview, /) -> object:
        """Take all of the bytes."""


@dataclass(frozen=True, slots=True)
class StoredPart:
    """One tensor of a shard file: its name, its dtype and its shape."""

    name: str
    dtype: torch.dtype
    sizes: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """Number of bytes that it takes."""
        return math.prod(self.sizes) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class FileLayout:
    """A shard file before it is written.

    Attributes:
        header: The bytes before the first tensor.
        starts: The tensors in their order, each with the position of its first byte in the file.
        size_bytes: Size of the file.
    """

    header: bytes
    starts: tuple[tuple[StoredPart, int], ...]
    size_bytes: int


def lay_out(parts: Sequence[StoredPart]) -> FileLayout:
    """Return where each part of a shard goes in its file."""
    return encode_header(sorted(parts, key=lambda part: (-part.dtype.itemsize, part.name)), NAMES, {"format": "pt"})


def encode_header(
    parts: Sequence[StoredPart], names: Mapping[torch.dtype, str], metadata: Mapping[str, str]
) -> FileLayout:
    """Return the layout of a file with parts in this order.

    Args:
        parts: By falling element size.
        names: The dtypes that the file names; parts of others are stored as bytes.
        metadata: Metadata of the file.
    """
    entries: dict[str, object] = {"__metadata__": metadata}
    position = 0
    positions = []
    for part in parts:
        end = position + part.size_bytes
        is_known = part.dtype in names
        entries[part.name] = {
            "dtype": names.get(part.dtype, "U8"),
            "shape": list(part.sizes) if is_known else [part.size_bytes],
            "data_offsets": [position, end],
        }
        positions.append((part, position))
        position = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % _ALIGNMENT)
    header = len(text).to_bytes(8, "little") + text
    starts = tuple((part, len(header) + position) for part, position in positions)
    return FileLayout(header, starts, len(header) + position)


def write_tensor(tensor: Tensor, sink: Sink) -> int:
    """Write a tensor's bytes and return their CRC-32. A copy is made only if it is on a device or not contiguous."""
    tensor = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    content = bytes_of(tensor)
    crc = 0
    for start in range(0, len(content), _PIECE):
        piece = content[start : start + _PIECE]  # small enough to be in the cache still when it is written
        crc = crc32(piece, crc)
        sink.write(piece)
    return crc


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor as writable bytes; it is valid as long as the tensor lives."""
    size = tensor.numel() * tensor.element_size()
    # Tensor.numpy() needs NumPy, which Loopwright does not require.
    return memoryview((ctypes.c_char * size).from_address(tensor.data_ptr() if size else 0)).cast("B")
