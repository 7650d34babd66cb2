"""`StoredTensor`: a tensor of a checkpoint folder that has not been read yet.

No process group is needed, torch.distributed is not imported, and nothing that is read can be executed.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing

import torch
from torch import Tensor

from ...errors import CheckpointError
from .. import verified
from .manifest import MANIFEST, Chunk, TensorEntry, damaged, decode
from .shard_files import ShardFiles, wrong_content
from .slices import RAW, read_box

__all__ = ["StoredTensor"]


class StoredTensor:
    """A tensor of a checkpoint folder that has not been read yet.

    Removing the folder, or saving over it, removes what this would read, unless the file is mapped into memory (on a
    local disk of Linux, from its first use on).

    Attributes:
        shape: Of the whole tensor.
        dtype: Of its elements.
        path: Where it is in the checkpoint, such as "state_dict/layer.weight".
    """

    def __init__(self, path: str, entry: TensorEntry, files: ShardFiles, shown: str) -> None:
        self.path = path
        self.shape = torch.Size(entry.shape)
        self.dtype = entry.torch_dtype
        self._entry = entry
        self._files = files
        self._shown = shown

    def __repr__(self) -> str:
        return f"<StoredTensor {self.path}: shape {tuple(self.shape)}, {self.dtype}, not read>"

    def read(self, offsets: Sequence[int] | None = None, sizes: Sequence[int] | None = None) -> Tensor:
        """Return a box of the tensor, on the CPU, in memory of its own.

        Only the bytes of the box are read, in pieces of at least a page (4 KiB; 1 MiB from a URL). The checksum of a
        chunk is compared if the box holds all of it, unless this process has compared the file already.

        Args:
            offsets: First index in each dimension; None is 0 in each.
            sizes: Shape of the box; None is up to the end in each.

        Raises:
            CheckpointError: The file is missing or damaged.
            ValueError: The box does not lie within the tensor.
        """
        first, box = self._resolve(offsets, sizes)
        into = torch.empty(box, dtype=RAW[self.dtype.itemsize])
        for chunk in self._entry.chunks:
            self._read_chunk(chunk, first, into)
        return into.view(self.dtype)

    def view_box(self, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor | None:
        """Return a box in the memory that the file is mapped to, for who copies it at once: this saves a copy.

        Its checksum is compared as by `read`, which gives the box where this returns None: it lies in several chunks,
        or the file cannot be mapped. What is written to the tensor does not reach the file.

        Raises:
            CheckpointError: The file is damaged.
            ValueError: The box does not lie within the tensor.
        """
        first, box = self._resolve(offsets, sizes)
        for chunk in self._entry.chunks:
            within = tuple(start - offset for start, offset in zip(first, chunk.offsets, strict=True))
            if all(at >= 0 and at + size <= whole for at, size, whole in zip(within, box, chunk.sizes, strict=True)):
                return self._mapped_box(chunk, within, box, self.dtype)
        return None

    def _resolve(
        self, offsets: Sequence[int] | None, sizes: Sequence[int] | None
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return first index and shape of a box."""
        first = tuple(offsets) if offsets is not None else (0,) * len(self.shape)
        if sizes is None:
            sizes = [size - start for size, start in zip(self.shape, first, strict=False)]
        box = tuple(sizes)
        if not len(first) == len(box) == len(self.shape) or any(
            start < 0 or size < 0 or start + size > whole
            for start, size, whole in zip(first, box, self.shape, strict=True)
        ):
            raise ValueError(f"the box at {first} of size {box} does not lie within {self!r}")
        return first, box

    def _read_chunk(self, chunk: Chunk, first: tuple[int, ...], into: Tensor) -> None:
        """Read what a chunk has of the box at `first`, whose memory is `into`."""
        starts = [max(a, b) for a, b in zip(chunk.offsets, first, strict=True)]
        ends = [min(a + m, b + n) for a, m, b, n in zip(chunk.offsets, chunk.sizes, first, into.shape, strict=True)]
        sizes = tuple(end - start for start, end in zip(starts, ends, strict=True))
        if any(size <= 0 for size in sizes):
            return
        part = into
        for dim, (start, size, origin) in enumerate(zip(starts, sizes, first, strict=True)):
            part = part.narrow(dim, start - origin, size)
        within = tuple(start - offset for start, offset in zip(starts, chunk.offsets, strict=True))
        mapped = self._mapped_box(chunk, within, sizes, into.dtype)
        if mapped is not None:
            part.copy_(mapped)
            return
        try:
            with closing(self._files.place.open(chunk.file)) as file:
                crc = read_box(file, chunk, within, part, self._files.least_run_bytes)
        except FileNotFoundError as error:
            raise self._missing(chunk) from error
        except EOFError as error:
            raise damaged(self._shown, [f"{chunk.file} is truncated, in {self.path}"]) from error
        except OSError as error:
            raise verified.cannot_read(self._files.place.address(chunk.file), error) from error
        if sizes == chunk.sizes and crc != chunk.crc32:
            raise damaged(self._shown, [wrong_content(self.path, chunk)])

    def _missing(self, chunk: Chunk) -> CheckpointError:
        place = self._files.place
        try:
            is_replaced = chunk.file not in decode(place.read(MANIFEST), self._shown).files
        except (OSError, CheckpointError):
            is_replaced = False
        if not is_replaced:
            return damaged(self._shown, [f"{chunk.file} is missing, with {self.path}"])
        return CheckpointError(
            f"{self.path} cannot be read: another checkpoint was saved to {self._shown!r} since it was opened.",
            fix="open it again, or let the training save under another name.",
        )

    def _mapped_box(
        self, chunk: Chunk, within: tuple[int, ...], sizes: tuple[int, ...], dtype: torch.dtype
    ) -> Tensor | None:
        """Return a box of a chunk in the memory that its file is mapped to; None if it is not."""
        mapped = self._files.mapped(chunk.file)
        if mapped is None:
            return None
        box = mapped.box(chunk.start, dtype, chunk.sizes)
        try:
            if sizes == chunk.sizes and not self._files.is_compared(chunk.file):
                if mapped.crc32(chunk.start, box.numel() * box.element_size()) != chunk.crc32:
                    raise damaged(self._shown, [wrong_content(self.path, chunk)])
                return box
            for dim, (start, size) in enumerate(zip(within, sizes, strict=True)):
                box = box.narrow(dim, start, size)
            mapped.bring_in(box)
        except OSError as error:
            raise verified.cannot_read(self._files.place.address(chunk.file), error) from error
        return box
