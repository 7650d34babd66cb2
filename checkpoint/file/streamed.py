"""`save_streaming`: a checkpoint file from tensors that are read one at a time.

torch.save writes the file with room for the tensors and without their bytes (`torch.serialization.skip_data`). Then
each is read and written to its place, and its CRC-32 put into the archive. So memory holds one tensor at a time, and
the disk no second copy. The commit is that of storage.py.
"""

from __future__ import annotations

import os
import struct
import tempfile
from collections.abc import Callable
from io import BufferedWriter, FileIO
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ...errors import CheckpointError
from ...protocols import StateDict, StorageOptions, Tree
from .. import storage
from ..plain import require_plain
from ..sharded.shard_file import write_tensor
from ..tensors import AnyTensor, Key, bracketed, map_tensors, read_tensor, size_bytes, tensors_in
from . import digest, disk
from .archive import DESCRIPTOR_SIGNATURE, ENTRY, ENTRY_SIGNATURE, Damaged, Directory, payloads, read_directory
from .disk import cannot_write
from .record_names import read_storages
from .remote import as_local

Advance = Callable[[int], object]

_CRC_IN_ENTRY = 16


class FileSink:
    """Writes all of what it is given to an unbuffered file.

    Args:
        file: Open for writing.
        advance: Called with the number of bytes that were written.
    """

    def __init__(self, file: FileIO, advance: Advance | None = None) -> None:
        self._file = file
        self._advance = advance

    def write(self, data: memoryview) -> int:
        """Write the bytes."""
        size = len(data)
        while data:
            data = data[self._file.write(data) :]
        if self._advance is not None:
            self._advance(size)
        return size


def save_streaming(
    checkpoint: StateDict,
    path: str | Path,
    *,
    advance: Advance | None = None,
    storage_options: StorageOptions | None = None,
) -> None:
    """Write a checkpoint file as storage.save does, from a tree with tensors that have not been read yet.

    Args:
        checkpoint: Plain values, tensors, and stored tensors; one that occurs twice is written once.
        path: File or URL; an existing file is replaced when the new one is complete.
        advance: Called with the number of bytes whenever some of a tensor were written.
        storage_options: Arguments of the remote file system.

    Raises:
        CheckpointError: An entry is not a plain value, or the file cannot be written.
    """
    tensors = [value for _, value in tensors_in(checkpoint)]
    is_odd = any(isinstance(t, Tensor) and (t.layout is not torch.strided or t.is_quantized) for t in tensors)
    if is_odd or all(isinstance(tensor, Tensor) for tensor in tensors):
        # A sparse tensor is several to torch.save; and what is in memory, or mapped to it, needs no reading.
        storage.save(map_tensors(checkpoint, lambda value, _: _in_memory(value)), path, storage_options)
        return
    rooms: dict[int, Tensor] = {}
    sources: dict[str, AnyTensor] = {}

    def make_room(value: AnyTensor, keys: tuple[Key, ...]) -> Tensor:
        sources[bracketed(keys)] = value
        if isinstance(value, Tensor):
            return value
        if id(value) not in rooms:
            # Nothing touches it, so that it takes address space and no memory.
            rooms[id(value)] = torch.empty(value.shape, dtype=value.dtype)
        return rooms[id(value)]

    tree = map_tensors(checkpoint, make_room)
    require_plain(tree)
    write_atomically(path, _size_bytes(checkpoint), lambda file: _write(tree, sources, file, advance), storage_options)


def write_atomically(
    path: str | Path, size: int, write: Callable[[FileIO], object], storage_options: StorageOptions | None = None
) -> None:
    """Let `write` write a new file, which takes the place of the one at the path when it is on the disk.

    Args:
        path: File or URL; what goes to a URL is written to a local temporary folder (TMPDIR) first.
        size: About how many bytes, for the message if they do not fit.
        write: Gets the file, open for reading and writing.
        storage_options: Arguments of the remote file system.

    Raises:
        CheckpointError: It cannot be written; no unfinished file is left.
    """
    try:
        disk.write_anywhere(path, write, storage_options)
    except Damaged as error:
        raise CheckpointError(
            f"{str(path)!r} could not be written: {error}.", fix="this is an error of Loopwright: please report it."
        ) from error
    except OSError as error:
        if isinstance(error, CheckpointError):  # CheckpointNotFound is both
            raise
        target = as_local(path)
        folder = Path(tempfile.gettempdir()) if target is None else target.parent
        raise cannot_write(repr(str(path)), error, size, folder) from error


def _in_memory(value: AnyTensor) -> Tensor:
    return value if isinstance(value, Tensor) else read_tensor(value)


def _size_bytes(tree: Tree) -> int:
    return sum({id(value): size_bytes(value) for _, value in tensors_in(tree)}.values())


def _write(tree: StateDict, sources: StateDict, file: FileIO, advance: Advance | None) -> None:
    writer = BufferedWriter(file, 1 << 20)
    try:
        with storage.with_crc32(), torch.serialization.skip_data():
            torch.save(tree, writer)
        writer.flush()
    finally:
        writer.detach()
    look = _look_through(file)
    storages = read_storages(look.pickled)
    unknown = {name for name in look.starts if name.startswith("data/")} - {f"data/{key}" for key in storages}
    if unknown:
        raise Damaged(f"nothing is known of the records {sorted(unknown)}")
    crcs: dict[str, int] = {}
    sink = FileSink(file, advance)
    for key, stored in storages.items():
        name = f"data/{key}"
        start, size = look.starts[name]
        if not size:
            continue  # neither bytes nor a descriptor; the checksum of nothing is 0
        file.seek(start)
        crcs[name] = crc = write_tensor(_bytes_below(sources[stored.path], size), sink)
        if os.pread(file.fileno(), 4, start + size) != DESCRIPTOR_SIGNATURE:
            raise Damaged(f"record {name!r} has no descriptor")
        os.pwrite(file.fileno(), struct.pack("<L", crc), start + size + 4)
    _put_checksums(file, look, crcs)
    digest.append_digest(file)


class _Look(NamedTuple):
    """Where things are in the archive: payloads (start, size) by name, the directory; and the content of data.pkl."""

    directory: Directory
    directory_start: int
    starts: dict[str, tuple[int, int]]
    pickled: bytes


def _look_through(file: FileIO) -> _Look:
    starts: dict[str, tuple[int, int]] = {}
    pickled, directory_start = b"", 0
    with open(file.fileno(), "rb", buffering=8192, closefd=False) as reader:
        directory = read_directory(reader, os.fstat(file.fileno()).st_size)
        for record, frame in payloads(reader, directory):
            if record is None:  # the last record's descriptor, the directory, and what leads to it
                directory_start = directory.end - len(frame) + frame.index(ENTRY_SIGNATURE)
                continue
            starts[record.name] = reader.tell(), record.size
            if record.name == "data.pkl":
                pickled = reader.read(record.size)
    return _Look(directory, directory_start, starts, pickled)


def _bytes_below(source: AnyTensor, size: int) -> Tensor:
    """Return the memory that a tensor is a view of, since others may be views of it, too; or what is read."""
    if isinstance(source, Tensor):
        return torch.empty(0, dtype=torch.uint8).set_(source.untyped_storage())[:size]
    tensor = read_tensor(source)
    if tensor.numel() * tensor.element_size() != size:
        raise Damaged(f"a tensor of shape {tuple(tensor.shape)} came where {size} bytes were expected")
    return tensor


def _put_checksums(file: FileIO, look: _Look, crcs: dict[str, int]) -> None:
    """Write checksums into the archive's directory, whose entries are in the order of the records."""
    position = look.directory_start
    for record in look.directory.records:
        entry = os.pread(file.fileno(), ENTRY.size, position)
        fields = ENTRY.unpack(entry)
        name = os.pread(file.fileno(), fields[10], position + ENTRY.size).decode()
        if fields[0] != ENTRY_SIGNATURE or name.partition("/")[2] != record.name:
            raise Damaged(f"the entry of record {record.name!r} is not where it should be")
        if record.name in crcs:
            os.pwrite(file.fileno(), struct.pack("<L", crcs[record.name]), position + _CRC_IN_ENTRY)
        position += ENTRY.size + sum(fields[10:13])
