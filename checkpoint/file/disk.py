"""File system operations for checkpoints: fsync, and files that are on the disk before they get their name."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Callable
from io import FileIO
from pathlib import Path

from ...errors import CheckpointError
from ...protocols import StorageOptions
from .remote import Remote, as_local

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


def make_folder(folder: Path) -> None:
    """Make a folder and its parents, so that they survive a power cut."""
    new = [parent for parent in (folder, *folder.parents) if not parent.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for parent in reversed(new):
        sync_folder(parent.parent)


def write_file(
    target: Path, write: Callable[[FileIO], object], reached: Callable[[str], object] = lambda stage: None
) -> None:
    """Let `write` write a new file, which takes the place of `target` in one step when it is on the disk.

    Args:
        target: Where it goes; missing folders are made, and a link is replaced, not followed.
        write: Gets the file, open for reading and writing.
        reached: Called after each stage of the save.

    Raises:
        OSError: It cannot be written, or there is a folder; no unfinished file is left.
    """
    from ...files import open_temporary, remove_quietly, remove_stale

    if target.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(target))
    make_folder(target.parent)
    remove_stale(target.parent)
    file, temporary = open_temporary(target)
    try:
        reached("opened")
        write(file)
        sync_file(file.fileno())
        reached("synced")
        # Renamed while it is open: its lock tells other processes that it is not stale.
        os.replace(temporary, target)
    except BaseException:
        remove_quietly(temporary)
        raise
    finally:
        file.close()
    reached("renamed")
    sync_folder(target.parent)
    reached("folder-synced")


def write_anywhere(
    path: str | Path,
    write: Callable[[FileIO], object],
    storage_options: StorageOptions | None = None,
    reached: Callable[[str], object] = lambda stage: None,
) -> None:
    """Let `write` write a new file, which takes the place of the one at the path when it is complete there.

    Args:
        path: File or URL; what goes to a URL is written to a local temporary folder (TMPDIR) first.
        write: Gets the file, open for reading and writing.
        storage_options: Arguments of the remote file system.
        reached: Called after each stage of the save.

    Raises:
        OSError: It cannot be written, or there is a folder; no unfinished file is left.
        CheckpointError: It cannot be sent to the URL.
    """
    target = as_local(path)
    if target is not None:
        write_file(target, write, reached)
        return
    remote = Remote(str(path), storage_options)
    with tempfile.TemporaryDirectory(prefix="loopwright-") as folder:
        made = Path(folder, "checkpoint.ckpt")
        with FileIO(made, "x+") as file:
            reached("opened")
            write(file)
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


def sync_file(descriptor: int) -> None:
    """Wait until a file's content is on the disk."""
    full_sync = getattr(fcntl, "F_FULLFSYNC", None)  # macOS: fsync leaves the data in the drive's cache
    if full_sync is not None:
        fcntl.fcntl(descriptor, full_sync)
    else:
        os.fsync(descriptor)


def sync_folder(folder: Path) -> None:
    """Wait until a folder's entries are on the disk, where the system can do that."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):  # some network file systems have no such call
            raise
    finally:
        os.close(descriptor)


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


def cannot_remove(shown: str, error: OSError) -> CheckpointError:
    """Return the error for a checkpoint that the system does not let us remove."""
    return CheckpointError(
        f"the checkpoint {shown!r} cannot be removed: {error.strerror or error}.",
        fix=_FIXES.get(error.errno or 0, "remove it manually."),
    )


def cannot_write(what: str, error: OSError, size_bytes: int, folder: Path) -> CheckpointError:
    """Return the error for what the system does not let us write: why, how much it needs, what is free.

    Args:
        what: Begins the sentence, such as "the checkpoint 'a.ckpt'".
        error: Error of the system.
        size_bytes: About how much was to be written.
        folder: On the disk that it was to be written to.
    """
    free = _free_bytes(folder)
    text = f"{what} could not be written: {error.strerror or error}. It needs about {size_bytes:,} bytes"
    text += f"; {free:,} bytes are free in {str(folder)!r}." if free is not None else "."
    text += " No unfinished file is left; a file that was at that path is intact."
    return CheckpointError(text, fix=_FIXES.get(error.errno or 0, "check the disk, or choose another folder."))


def _free_bytes(folder: Path) -> int | None:
    """Return the free space where a folder is, or would be; None if the system does not say."""
    for place in (folder, *folder.absolute().parents):
        try:
            return shutil.disk_usage(place).free
        except OSError:  # not made yet, or not ours to see: the one above may say
            continue
    return None
