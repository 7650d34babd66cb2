"""How a checkpoint gets to disk and back: whole or not at all. Called by Fabric, the Trainer and CheckpointIO plugins.

A save writes a temporary file beside the target, seals it (seal.py), waits for the disk, renames it, and waits for the
folder. A process may be killed at any moment: either the old file or the new one is at the path, each of them whole.
"""

from __future__ import annotations

import errno
import io
import os
import pickle
import shutil
import struct
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import torch

from ..errors import CheckpointError
from . import disk, seal, verified
from .archive import Damaged
from .plain import require_plain, tensors, untrust
from .remote import Remote, as_local
from .verified import CheckpointNotFound, Verified, newest_valid, verify

__all__ = [
    "STAGES",
    "CheckpointNotFound",
    "Verified",
    "cannot_remove",
    "cannot_write",
    "load",
    "newest_valid",
    "reached",
    "remove",
    "save",
    "verify",
    "verify_share",
]

STAGES = ("opened", "written", "sealed", "synced", "renamed", "folder-synced")

_BUFFER = 1 << 20

# What torch.load raises for bytes that are no checkpoint; it documents no list.
_READ_ERRORS = (
    pickle.UnpicklingError,
    EOFError,
    RuntimeError,
    ValueError,
    KeyError,
    IndexError,
    TypeError,
    AttributeError,
    AssertionError,
    OverflowError,
    struct.error,
)

_FIXES = {
    errno.ENOSPC: "free space on that disk, keep fewer checkpoints (save_top_k), or choose another folder (dirpath).",
    errno.EACCES: "choose a folder that this user may write to (dirpath, default_root_dir), or change its permissions.",
    errno.EROFS: "the file system is read-only: choose another folder (dirpath, default_root_dir).",
    errno.EFBIG: "raise the limit on the size of a file (`ulimit -f`), or choose another file system.",
    errno.ENOTDIR: "a part of the path is a file, not a folder: choose another folder.",
    errno.EISDIR: "pass the path of a file: there is a folder of that name.",
    errno.ENAMETOOLONG: "choose a shorter file name.",
}
_FIXES[errno.EDQUOT] = _FIXES[errno.ENOSPC]
_FIXES[errno.EPERM] = _FIXES[errno.EACCES]
_FIXES[errno.EEXIST] = _FIXES[errno.ENOTDIR]


def reached(stage: str) -> None:
    """Do nothing; tests put a fault here. Called after each of STAGES of a save."""


def save(
    checkpoint: dict[str, Any],  # Any: tensors and plain values, nested
    path: str | Path,
    storage_options: dict[str, Any] | None = None,  # Any: fsspec's own
) -> None:
    """Write a checkpoint so that it is whole at the path when this returns, and survives a power cut.

    What stood at the path before stays whole until the new file takes its place; so there must be room for both.
    No copy of the state is made in memory, except of one tensor at a time that is on a device. A remote one is
    made in a local temporary folder (TMPDIR) first.

    Args:
        checkpoint: Tensors and plain values only, and `Trusted` objects.
        path: File or URL. Missing folders are made; a link is replaced, not followed. A folder, that of a sharded
            checkpoint too, is refused.
        storage_options: Arguments of the remote file system.

    Raises:
        CheckpointError: The content is not plain, or it could not be written; no unfinished file is left.
    """
    require_plain(checkpoint)
    target = as_local(path)
    if target is None:
        _save_remote(checkpoint, Remote(str(path), storage_options))
        return
    with _explained(checkpoint, str(path), target.parent):
        if target.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(target))
        disk.make_folder(target.parent)
        disk.remove_stale(target.parent)
        file, temporary = disk.open_temporary(target)
        try:
            reached("opened")
            _write(checkpoint, file)
            disk.sync_file(file.fileno())
            reached("synced")
            # Renamed while it is open: its lock tells other processes that it is not stale.
            os.replace(temporary, target)
        except BaseException:
            disk.remove_quietly(temporary)
            raise
        finally:
            file.close()
        reached("renamed")
        disk.sync_folder(target.parent)
        reached("folder-synced")


def load(
    path: str | Path,
    map_location: Any = None,  # Any: as in torch.load
    weights_only: bool | None = True,
    mmap: bool = False,
    verify: bool = True,
    storage_options: dict[str, Any] | None = None,  # Any: fsspec's own
    *,
    lazy: bool = False,
) -> dict[str, Any]:
    """Read a checkpoint, a file or a folder (sharded, or DeepSpeed's), after comparing it with its checksums.

    With weights_only=True (or None) nothing in the file can be executed. With False, `Trusted` objects are unpickled,
    and files of other programs that hold arbitrary objects are read with pickle: both can run any code. Of DeepSpeed's
    folders nothing is ever executed: with False, objects are left out there.

    Args:
        path: File, folder or URL; a remote file is copied to a local temporary folder (TMPDIR) first.
        map_location: Where tensors go, as in torch.load.
        weights_only: Whether to read tensors and plain values only.
        mmap: Whether CPU tensors of a file stay on the disk until they are used, as in torch.load.
        verify: Whether to read the whole file first and compare checksums.
        storage_options: Arguments of the remote file system.
        lazy: Whether tensors stay on the disk: those of a file as with mmap, the sharded ones of a folder as
            `sharded.StoredTensor`. Otherwise they are whole tensors in both.

    Raises:
        CheckpointNotFound: There is no such file; it is a FileNotFoundError too.
        CheckpointError: The file is damaged, or cannot be read safely; the message says which entry.
    """
    local = as_local(path)
    if verified.is_folder_checkpoint(path, storage_options):
        from . import sharded

        return sharded.load(
            path,
            lazy=lazy,
            map_location=map_location,
            weights_only=weights_only,
            verify=verify,
            storage_options=storage_options,
        )
    if local is not None and local.is_dir():
        from . import deepspeed_folder

        if deepspeed_folder.is_deepspeed_folder(local):
            return deepspeed_folder.load(
                local, map_location=map_location, lazy=lazy, is_safe=weights_only is not False, verify=verify
            )
    mmap = mmap or lazy
    if local is not None:
        return _load(local, str(path), map_location, is_safe=weights_only is not False, mmap=mmap, verify=verify)
    remote = Remote(str(path), storage_options)
    if not remote.exists():
        raise verified.not_found(str(path), remote.neighbours())
    with tempfile.TemporaryDirectory(prefix="loopwright-") as folder:
        copy = Path(folder, "checkpoint.ckpt")
        remote.fetch(copy)
        return _load(copy, str(path), map_location, is_safe=weights_only is not False, mmap=mmap, verify=verify)


def verify_share(
    path: str | Path,
    rank: int,
    size: int,
    storage_options: dict[str, Any] | None = None,  # Any: fsspec's own
) -> None:
    """Verify this rank's share of a checkpoint, so that all ranks together read each file once. Does not communicate.

    Whoever calls it on all ranks tells them of each other's errors, and loads with verify=False. Of a single file, rank
    0's share is all. Where each host has a copy of its own, copies of files are not compared that another host read.

    Args:
        path: File, folder of a sharded checkpoint, or URL.
        rank: Of this process.
        size: Number of processes.
        storage_options: Arguments of the remote file system.

    Raises:
        CheckpointNotFound: There is no such file.
        CheckpointError: Something in this share is damaged; see `verify`.
    """
    if verified.is_folder_checkpoint(path, storage_options):
        from . import sharded

        sharded.verify_share(path, rank, size, storage_options)
        return
    local = as_local(path)
    files = verified.files_of_deepspeed(local) if local is not None else []
    for file in files[rank::size]:
        verified.verify_as(file, str(file))
    if not files and rank == 0:
        verify(path, storage_options)


def remove(path: str | Path, storage_options: dict[str, Any] | None = None) -> None:  # Any: fsspec's own
    """Remove a checkpoint, a file or the folder of a sharded one; nothing happens if there is none.

    Raises:
        CheckpointError: It is another folder, or the system does not allow it.
    """
    local = as_local(path)
    try:
        if verified.is_folder_checkpoint(path, storage_options):
            from . import sharded

            sharded.remove(path, storage_options)
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


def cannot_remove(shown: str, error: OSError) -> CheckpointError:
    """Return the error for a checkpoint that the system does not let us remove."""
    return CheckpointError(
        f"the checkpoint {shown!r} cannot be removed: {error.strerror or error}.",
        fix=_FIXES.get(error.errno or 0, "remove it by hand."),
    )


def cannot_write(what: str, error: OSError, size_bytes: int, folder: Path) -> CheckpointError:
    """Return the error for what the system does not let us write: why, how much it needs, what is free.

    Args:
        what: Begins the sentence, such as "the checkpoint 'a.ckpt'".
        error: Of the system.
        size_bytes: About how much was to be written.
        folder: On the disk that it was to be written to.
    """
    free = _free_bytes(folder)
    text = f"{what} could not be written: {error.strerror or error}. It needs about {size_bytes:,} bytes"
    text += f"; {free:,} bytes are free in {str(folder)!r}." if free is not None else "."
    text += " No unfinished file is left; if there is a file at that path, it is whole."
    return CheckpointError(text, fix=_FIXES.get(error.errno or 0, "check the disk, or choose another folder."))


def _save_remote(checkpoint: dict[str, Any], remote: Remote) -> None:  # Any: see save
    with tempfile.TemporaryDirectory(prefix="loopwright-") as folder:
        made = Path(folder, "checkpoint.ckpt")
        with _explained(checkpoint, remote.url, Path(folder)), io.FileIO(made, "x+") as file:
            reached("opened")
            _write(checkpoint, file)
        try:
            if remote.is_folder():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), remote.url)
            remote.send(made)
        except Exception as error:  # each remote store has errors of its own, which share no base class
            raise CheckpointError(
                f"the checkpoint could not be sent to {remote.url!r}: {type(error).__name__}: {error}",
                fix="check the address, the credentials (storage_options) and the network, and save again.",
            ) from error
        reached("renamed")


def _write(checkpoint: dict[str, Any], file: io.FileIO) -> None:  # Any: see save
    # Large records pass through a BufferedWriter without a copy. It is as fast as torch's own file writer, and gives
    # the system's error (disk full, quota) where torch gives "file write failed".
    writer = io.BufferedWriter(file, _BUFFER)
    try:
        with _crc32():
            torch.save(checkpoint, writer)
        writer.flush()
    except BaseException:
        file.close()  # else the writer would try once more to write when it is collected
        raise
    writer.detach()
    reached("written")
    seal.seal(file)
    reached("sealed")


@contextmanager
def _crc32() -> Iterator[None]:
    """Have torch.save write a CRC-32 for each record; a user may have switched that off."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(True)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


@contextmanager
def _explained(checkpoint: dict[str, Any], shown: str, folder: Path) -> Iterator[None]:  # Any: see save
    """Turn the errors of a save into a CheckpointError that says what, where, how much, and what to do."""
    outer = sys.exc_info()[1]  # a save may run while an exception is handled, which is not its own
    try:
        yield
    except (OSError, RuntimeError, pickle.PicklingError, TypeError, Damaged) as error:
        if isinstance(error, CheckpointError):
            raise
        _raise_explained(_first_cause(error, outer), checkpoint, shown, folder)


def _first_cause(error: BaseException, outer: BaseException | None) -> BaseException:
    """Return what happened first: torch's writer raises again while it closes the file."""
    found: BaseException | None = error
    while found is not None and found is not outer:
        error = found
        found = found.__cause__ or found.__context__
    return error


def _raise_explained(
    error: BaseException, checkpoint: dict[str, Any], shown: str, folder: Path
) -> NoReturn:  # Any: see save
    if not isinstance(error, Exception):  # Ctrl-C: torch has put its own error in front of it
        raise error
    if not isinstance(error, OSError):
        raise CheckpointError(
            f"the checkpoint {shown!r} could not be written: {type(error).__name__}: {error}{_shared(checkpoint)}",
            fix="change the named entry, for tensors with .clone(); what was at that path before is whole.",
        ) from error
    raise cannot_write(f"the checkpoint {shown!r}", error, _size_bytes(checkpoint), folder) from error


def _load(
    path: Path, shown: str, map_location: Any, *, is_safe: bool, mmap: bool, verify: bool
) -> dict[str, Any]:  # Any: see load
    if verify or not os.access(path, os.R_OK) or path.is_dir():  # the latter are explained there
        is_sealed = verified.verify_as(path, shown).sealed
    else:
        with open(path, "rb") as file:
            is_sealed = seal.is_sealed(file, path.stat().st_size)
    try:  # what we have sealed is plain: nothing but the Trusted entries needs trust
        loaded = _read(path, map_location, mmap=mmap, is_safe=is_safe or is_sealed)
    except OSError as error:
        raise verified.cannot_read(shown, error) from error
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"the checkpoint {shown!r} cannot be read safely, as tensors and plain values: {_reason(error)}",
            fix="pass weights_only=False, only if you trust whoever wrote the file: reading it so can run any code.",
        ) from error
    except _READ_ERRORS as error:
        raise CheckpointError(
            f"the checkpoint {shown!r} cannot be read: {type(error).__name__}: {error}",
            fix="if it was saved on another device, pass map_location='cpu'; else the file is damaged.",
        ) from error
    if not isinstance(loaded, dict):
        raise CheckpointError(
            f"{shown!r} holds a {type(loaded).__name__}, and a checkpoint is a dict.",
            fix="pass a file that a Trainer has saved, or read this one with torch.load.",
        )
    result: dict[str, Any] = untrust(loaded, allow=not is_safe)
    return result


def _read(path: Path, map_location: Any, *, mmap: bool, is_safe: bool) -> Any:  # Any: whatever the file holds
    if is_safe:
        return torch.load(path, map_location=map_location, weights_only=True, mmap=mmap)
    try:
        with warnings.catch_warnings():  # about pickle protocols, which do not matter for the reading below
            warnings.simplefilter("ignore")
            return torch.load(path, map_location=map_location, weights_only=True, mmap=mmap)
    except (pickle.UnpicklingError, RuntimeError):
        return torch.load(path, map_location=map_location, weights_only=False, mmap=mmap)


def _reason(error: pickle.UnpicklingError) -> str:
    """Return the sentence of torch's long message that says what it refused."""
    text = str(error).partition("Check the documentation")[0].rpartition("WeightsUnpickler error:")[2]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1].partition(" Please use")[0] if lines else type(error).__name__


def _size_bytes(checkpoint: dict[str, Any]) -> int:  # Any: see save
    sizes = {}
    for _, tensor in tensors(checkpoint):
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):  # sparse: made of several
            sizes[id(tensor)] = tensor.element_size() * tensor.numel()
        else:
            sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def _shared(checkpoint: dict[str, Any]) -> str:  # Any: see save
    """Return which tensors share memory under different dtypes, which torch.save refuses; empty if there are none."""
    first: dict[int, tuple[str, torch.dtype]] = {}
    for path, tensor in tensors(checkpoint):
        if tensor.layout is not torch.strided or tensor.untyped_storage().data_ptr() == 0:
            continue
        other, dtype = first.setdefault(tensor.untyped_storage().data_ptr(), (path, tensor.dtype))
        if dtype != tensor.dtype:
            return f" ({other} and {path} share memory, as {dtype} and {tensor.dtype})"
    return ""


def _free_bytes(folder: Path) -> int | None:
    """Return the free space where a folder is, or would be; None if the system does not say."""
    for place in (folder, *folder.absolute().parents):
        try:
            return shutil.disk_usage(place).free
        except OSError:  # not made yet, or not ours to see: the one above may say
            continue
    return None
