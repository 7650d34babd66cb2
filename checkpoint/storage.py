"""Checkpoint storage: `save`, `load`, `verify` and `remove`, atomic and verified.

A save writes a temporary file beside the target, appends a digest (file/digest.py), waits for the disk, renames it, and
waits for the folder. If the process is killed at any moment, the path has either the old file or the new one, intact.
"""

from __future__ import annotations

import errno
import io
import os
import pickle
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import torch

from ..errors import CheckpointError
from ..protocols import MapLocation, StateDict, StorageOptions
from . import verified
from .file import digest, disk
from .file.archive import Damaged
from .file.disk import cannot_remove, cannot_write
from .file.remote import Remote, as_local
from .formats import find_format
from .plain import WithObjects, require_plain, tensors
from .verified import CheckpointNotFound, Verified, newest_valid, verify

__all__ = [
    "STAGES",
    "CheckpointNotFound",
    "Verified",
    "load",
    "newest_valid",
    "reached",
    "remove",
    "save",
    "verify",
    "verify_share",
]

STAGES = ("opened", "written", "digest-written", "synced", "renamed", "folder-synced")

_BUFFER = 1 << 20


def reached(stage: str) -> None:
    """Do nothing; tests put a fault here. Called after each of STAGES of a save."""


def save(checkpoint: StateDict, path: str | Path, storage_options: StorageOptions | None = None) -> None:
    """Write a checkpoint atomically; when this returns, it is complete and survives a power cut.

    An existing file stays intact until the new one replaces it, so the disk needs space for both. The state is not
    copied in memory, except one tensor at a time that is on a device. A remote checkpoint is first written to a local
    temporary folder (TMPDIR).

    Args:
        checkpoint: Tensors, plain values and `Trusted` objects.
        path: File or URL. Missing folders are created; a link is replaced, not followed. A folder is an error.
        storage_options: Arguments of the remote file system.

    Raises:
        CheckpointError: The content is not plain, or cannot be written; no unfinished file is left.
    """
    require_plain(checkpoint)
    target = as_local(path)
    with _explained(checkpoint, str(path), Path(tempfile.gettempdir()) if target is None else target.parent):
        disk.write_anywhere(path, lambda file: _write(checkpoint, file), storage_options, reached)


def load(
    path: str | Path,
    map_location: MapLocation = None,
    weights_only: bool | None = True,
    mmap: bool = False,
    verify: bool = True,
    storage_options: StorageOptions | None = None,
    *,
    lazy: bool = False,
) -> StateDict:
    """Read a checkpoint, a file or a folder (sharded, or DeepSpeed's), after verifying its checksums.

    With weights_only=True (or None), nothing in the file can be executed. With False, `Trusted` objects are unpickled,
    and files of other programs with arbitrary objects are read with pickle: both can run any code. Nothing in folders
    of DeepSpeed is ever executed: with False, objects are left out.

    Args:
        path: File, folder or URL; a remote file is copied to a local temporary folder (TMPDIR) first.
        map_location: Device for the tensors, as in torch.load.
        weights_only: Whether to read tensors and plain values only.
        mmap: Whether CPU tensors of a file stay on the disk until they are used, as in torch.load.
        verify: Whether to read the full file first and compare its checksums.
        storage_options: Arguments of the remote file system.
        lazy: Whether tensors stay on the disk: those of a file as with mmap, the sharded ones of a folder as
            `sharded.StoredTensor`. Otherwise they are full tensors in both.

    Raises:
        CheckpointNotFound: There is no such file; it is a FileNotFoundError too.
        CheckpointError: The file is damaged, or cannot be read safely; names the entry.
    """
    found = find_format(path, storage_options)
    if found is not None:
        return found.reader.load(
            path,
            lazy=lazy,
            map_location=map_location,
            weights_only=weights_only,
            verify=verify,
            storage_options=storage_options,
        )
    from .file.reading import read_file  # not imported where nothing is resumed

    local = as_local(path)
    mmap = mmap or lazy
    if local is not None:
        return read_file(local, str(path), map_location, is_safe=weights_only is not False, mmap=mmap, verify=verify)
    remote = Remote(str(path), storage_options)
    if not remote.exists():
        remote.check_readable()
        raise verified.not_found(str(path), remote.neighbours())
    with tempfile.TemporaryDirectory(prefix="loopwright-") as folder:
        copy = Path(folder, "checkpoint.ckpt")
        remote.fetch(copy)
        return read_file(copy, str(path), map_location, is_safe=weights_only is not False, mmap=mmap, verify=verify)


def verify_share(path: str | Path, rank: int, size: int, storage_options: StorageOptions | None = None) -> None:
    """Verify this rank's share of a checkpoint, so that all ranks read each file once. Does not communicate.

    The caller must share errors between ranks, and then loads with verify=False. Rank 0 verifies all of a single file.
    If each host has a separate copy, each copy is verified only in part.

    Args:
        path: File, folder of a sharded checkpoint, or URL.
        rank: Rank of this process.
        size: Number of processes.
        storage_options: Arguments of the remote file system.

    Raises:
        CheckpointNotFound: There is no such file.
        CheckpointError: A file of this share is damaged; see `verify`.
    """
    found = find_format(path, storage_options)
    if found is not None:
        found.reader.verify_share(path, rank, size, storage_options)
    elif rank == 0:
        verify(path, storage_options)


def remove(path: str | Path, storage_options: StorageOptions | None = None) -> None:
    """Remove a checkpoint, a file or the folder of a sharded one; nothing happens if there is none.

    Raises:
        CheckpointError: It is another folder, or the system does not allow it.
    """
    local = as_local(path)
    try:
        found = find_format(path, storage_options)
        if found is not None:
            found.reader.remove(path, storage_options)
            return
        if local is None:
            remote = Remote(str(path), storage_options)
            if remote.exists():
                remote.remove()
            return
        if local.is_dir() and not local.is_symlink():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(local))
        local.unlink(missing_ok=True)
    except OSError as error:
        raise cannot_remove(str(path), error) from error


def _write(checkpoint: StateDict, file: io.FileIO) -> None:
    from .file.pickling import PICKLE  # not imported where nothing is saved

    # Large records pass through a BufferedWriter without a copy. It is as fast as torch's own file writer, and gives
    # the system's error (disk full, quota) where torch gives "file write failed".
    writer = io.BufferedWriter(file, _BUFFER)
    try:
        with with_crc32():
            torch.save(dict(checkpoint) if type(checkpoint) is WithObjects else checkpoint, writer, PICKLE)
        writer.flush()
    except BaseException:
        file.close()  # else the writer would try once more to write when it is collected
        raise
    writer.detach()
    reached("written")
    digest.append_digest(file)
    reached("digest-written")


@contextmanager
def with_crc32() -> Iterator[None]:
    """Have torch.save write a CRC-32 for each record; a user may have switched that off."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(True)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


@contextmanager
def _explained(checkpoint: StateDict, shown: str, folder: Path) -> Iterator[None]:
    """Turn the errors of a save into a CheckpointError with cause, path, size and remedy."""
    outer = sys.exc_info()[1]  # a save may run while an exception is handled, which is not its own
    try:
        yield
    except (OSError, RuntimeError, pickle.PicklingError, TypeError, Damaged) as error:
        if isinstance(error, CheckpointError):
            raise
        _raise_explained(_first_cause(error, outer), checkpoint, shown, folder)


def _first_cause(error: BaseException, outer: BaseException | None) -> BaseException:
    """Return the first error: torch's writer raises again while it closes the file."""
    found: BaseException | None = error
    while found is not None and found is not outer:
        error = found
        found = found.__cause__ or found.__context__
    return error


def _raise_explained(error: BaseException, checkpoint: StateDict, shown: str, folder: Path) -> NoReturn:
    if not isinstance(error, Exception):  # Ctrl-C: torch has put its own error in front of it
        raise error
    if not isinstance(error, OSError):
        raise CheckpointError(
            f"the checkpoint {shown!r} could not be written: {type(error).__name__}: {error}{_shared(checkpoint)}",
            fix="change the named entry, for tensors with .clone(); an existing checkpoint at that path is intact.",
        ) from error
    raise cannot_write(f"the checkpoint {shown!r}", error, _size_bytes(checkpoint), folder) from error


def _size_bytes(checkpoint: StateDict) -> int:
    sizes = {}
    for _, tensor in tensors(checkpoint):
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):  # sparse: made of several
            sizes[id(tensor)] = tensor.element_size() * tensor.numel()
        else:
            sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def _shared(checkpoint: StateDict) -> str:
    """Return which tensors share memory under different dtypes, which torch.save refuses; empty if there are none."""
    first: dict[int, tuple[str, torch.dtype]] = {}
    for path, tensor in tensors(checkpoint):
        if tensor.layout is not torch.strided or tensor.untyped_storage().data_ptr() == 0:
            continue
        other, dtype = first.setdefault(tensor.untyped_storage().data_ptr(), (path, tensor.dtype))
        if dtype != tensor.dtype:
            return f" ({other} and {path} share memory, as {dtype} and {tensor.dtype})"
    return ""
