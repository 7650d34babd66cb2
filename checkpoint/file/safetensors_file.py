"""Reads and writes safetensors files: weights without anything else.

safetensors has no tied tensors: of several names of one tensor, the first is written; the others are in the metadata
under `loopwright.tied`, as JSON from each to the first, and are restored when Loopwright reads the file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from io import FileIO
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ...errors import CheckpointError
from ...messages import counted
from ...protocols import Advance, StorageOptions
from ..sharded.shard_file import NAMES, StoredPart, encode_header, write_tensor
from ..tensors import AnyTensor, StoredTensor, is_tensor, memory_key, read_tensor
from .streamed import FileSink, write_atomically

TIED_KEY = "loopwright.tied"

_NAMES = {**NAMES, torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2"}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


class SafetensorsTensor(StoredTensor):
    """A tensor of a safetensors file that has not been read yet."""

    def __init__(self, file: Path, name: str, shape: Sequence[int], dtype: torch.dtype) -> None:
        super().__init__(name, shape, dtype)
        self._file = file

    def _read(self, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
        with safe_open(str(self._file), "pt", device="cpu") as file:
            if sizes == self.shape:
                result: Tensor = file.get_tensor(self.path)
            else:
                where = tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))
                result = file.get_slice(self.path)[where]
        return result


def read_weights(path: Path) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """Return the tensors of a file by name, not read, and its metadata.

    Raises:
        CheckpointError: It is not a safetensors file, or is truncated.
    """
    try:
        with safe_open(str(path), "pt", device="cpu") as file:
            metadata = dict(sorted((file.metadata() or {}).items()))  # they come in any order
            found: dict[str, StoredTensor] = {}
            for name in file.keys():  # noqa: SIM118  # it is not a mapping
                part = file.get_slice(name)
                dtype = _DTYPES.get(part.get_dtype())
                if dtype is None:
                    dtype = file.get_tensor(name).dtype
                found[name] = SafetensorsTensor(path, name, part.get_shape(), dtype)
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(
            f"{str(path)!r} cannot be read as safetensors: {error}.",
            fix="copy the file again from where it came; it is truncated, altered, or of another kind.",
        ) from error
    for name, first in _tied(metadata).items():
        if first in found and name not in found:
            found[name] = found[first]
    return found, metadata


def write_weights(
    weights: Mapping[str, AnyTensor],
    path: str | Path,
    *,
    advance: Advance | None = None,
    storage_options: StorageOptions | None = None,
) -> None:
    """Write tensors as a safetensors file, one at a time in memory; the file appears when it is complete.

    Args:
        weights: By name; one with several names is written once.
        path: File or URL.
        advance: Called with the number of bytes whenever some were written.
        storage_options: Arguments of the remote file system.

    Raises:
        CheckpointError: There are entries that such a file cannot hold, which are all named, or it cannot be written.
    """
    problems = [
        f"{name}: {value.dtype if is_tensor(value) else type(value).__name__}"
        for name, value in weights.items()
        if not is_tensor(value) or value.dtype not in _NAMES
    ]
    if problems:
        raise CheckpointError(
            f"{counted(len(problems), 'entry')} cannot be written to a safetensors file: {', '.join(problems[:10])}.",
            fix="write another format (--to state-dict), or leave them out of the state dict.",
        )
    names = [name for name in weights if name == "__metadata__" or type(name) is not str]
    if names:
        raise CheckpointError(f"a safetensors file cannot have the names {names}.", fix="rename them with --map.")
    tied = _find_tied(weights)
    kept = sorted((name for name in weights if name not in tied), key=lambda name: -weights[name].dtype.itemsize)
    metadata = {"format": "pt"} | ({TIED_KEY: json.dumps(tied)} if tied else {})
    parts = [StoredPart(name, weights[name].dtype, tuple(weights[name].shape)) for name in kept]
    layout = encode_header(parts, _NAMES, metadata)

    def write(file: FileIO) -> None:
        FileSink(file).write(memoryview(layout.header))
        sink = FileSink(file, advance)
        for name in kept:
            write_tensor(read_tensor(weights[name]), sink)

    write_atomically(path, layout.size_bytes, write, storage_options)


def _find_tied(weights: Mapping[str, AnyTensor]) -> dict[str, str]:
    """Return for each further name of a tensor its first one."""
    first: dict[object, str] = {}
    firsts = {name: first.setdefault(memory_key(value), name) for name, value in weights.items()}
    return {name: other for name, other in firsts.items() if other != name}


def _tied(metadata: Mapping[str, str]) -> dict[str, str]:
    try:
        tied = json.loads(metadata.get(TIED_KEY, "{}"))
    except ValueError:
        return {}
    return {str(name): str(first) for name, first in tied.items()} if isinstance(tied, dict) else {}
