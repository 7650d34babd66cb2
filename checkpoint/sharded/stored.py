"""Tensors of a sharded checkpoint that have not been read yet.

No process group is needed, torch.distributed is not imported, and nothing that is read can be executed.
"""

from __future__ import annotations

from contextlib import closing

import torch
from torch import Tensor

from ...errors import CheckpointError
from .. import verified
from ..tensors import Offsets, StoredTensor, narrow, overlap
from .manifest import MANIFEST, Chunk, TensorEntry, damaged, decode
from .shard_files import ShardFiles, wrong_content
from .slices import RAW, read_slice


class ShardedTensor(StoredTensor):
    """A tensor of a sharded checkpoint that has not been read yet.

    Only the bytes of a slice are read, in pieces of at least a page (4 KiB; 1 MiB from a URL). The checksum of a chunk
    is compared if the slice holds all of it, unless this process has compared the file already.

    Removing the folder, or saving over it, removes what this would read, unless the file is mapped into memory (on a
    local disk of Linux, from its first use on).
    """

    def __init__(self, path: str, entry: TensorEntry, files: ShardFiles, shown: str) -> None:
        super().__init__(path, entry.shape, entry.torch_dtype)
        self._entry = entry
        self._files = files
        self._shown = shown

    def _read(self, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
        into = torch.empty(sizes, dtype=RAW[self.dtype.itemsize])
        count = sum(self._read_chunk(chunk, offsets, into) for chunk in self._entry.chunks)
        if count != into.numel():
            raise CheckpointError(
                f"{self._shown} has a part of {self.path} only, as the ranks of one node held it, and not all of the "
                f"slice at {offsets} of size {sizes}.",
                fix="read it on the ranks that wrote it, or use a full checkpoint.",
            )
        return into.view(self.dtype)

    def view_slice(self, offsets: Offsets, sizes: Offsets) -> Tensor | None:
        """Return a slice in the memory that its file is mapped to, which saves a copy; None if that is not possible.

        It is not if the slice lies in several chunks, or if the file cannot be mapped. The checksum is compared as by
        `read`. What is written to the result does not reach the file.
        """
        first, extent = self._resolve(offsets, sizes)
        for chunk in self._entry.chunks:
            within = _within(chunk, first)
            if all(at >= 0 and at + size <= full for at, size, full in zip(within, extent, chunk.sizes, strict=True)):
                return self._mapped_slice(chunk, within, extent, self.dtype)
        return None

    def _read_chunk(self, chunk: Chunk, first: tuple[int, ...], into: Tensor) -> int:
        """Read what a chunk has of the slice at `first`, whose memory is `into`; return the number of elements."""
        common = overlap(chunk.offsets, chunk.sizes, first, into.shape)
        if common is None:
            return 0
        starts, sizes = common
        part = narrow(into, [start - origin for start, origin in zip(starts, first, strict=True)], sizes)
        within = _within(chunk, starts)
        mapped = self._mapped_slice(chunk, within, sizes, into.dtype)
        if mapped is not None:
            part.copy_(mapped)
            return part.numel()
        try:
            with closing(self._files.backend.open(chunk.file)) as file:
                crc = read_slice(file, chunk, within, part, self._files.least_run_bytes)
        except FileNotFoundError as error:
            raise self._missing(chunk) from error
        except EOFError as error:
            raise damaged(self._shown, [f"{chunk.file} is truncated, in {self.path}"]) from error
        except OSError as error:
            raise verified.cannot_read(self._files.backend.address(chunk.file), error) from error
        if sizes == chunk.sizes and crc != chunk.crc32:
            raise damaged(self._shown, [wrong_content(self.path, chunk)])
        return part.numel()

    def _missing(self, chunk: Chunk) -> CheckpointError:
        backend = self._files.backend
        try:
            is_replaced = chunk.file not in decode(backend.read(MANIFEST), self._shown).files
        except (OSError, CheckpointError):
            is_replaced = False
        if not is_replaced:
            return damaged(self._shown, [f"{chunk.file} is missing, with {self.path}"])
        return CheckpointError(
            f"{self.path} cannot be read: another checkpoint was saved to {self._shown!r} since it was opened.",
            fix="open it again, or let the training save under another name.",
        )

    def _mapped_slice(
        self, chunk: Chunk, within: tuple[int, ...], sizes: tuple[int, ...], dtype: torch.dtype
    ) -> Tensor | None:
        """Return a slice of a chunk in the memory that its file is mapped to; None if it is not."""
        mapped = self._files.mapped(chunk.file)
        if mapped is None:
            return None
        full = mapped.tensor(chunk.start, dtype, chunk.sizes)
        try:
            if sizes == chunk.sizes and not self._files.is_compared(chunk.file):
                if mapped.crc32(chunk.start, full.numel() * full.element_size()) != chunk.crc32:
                    raise damaged(self._shown, [wrong_content(self.path, chunk)])
                return full
            part = narrow(full, within, sizes)
            mapped.bring_in(part)
        except OSError as error:
            raise verified.cannot_read(self._files.backend.address(chunk.file), error) from error
        return part


def _within(chunk: Chunk, first: tuple[int, ...]) -> tuple[int, ...]:
    """Return an index of the tensor as an index of a chunk."""
    return tuple(start - offset for start, offset in zip(first, chunk.offsets, strict=True))
