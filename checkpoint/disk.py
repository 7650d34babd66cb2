"""What the file system does for a checkpoint: a locked temporary file, fsync, rename, removal of stale files.

Called by storage.py.
"""

from __future__ import annotations

import errno
import logging
import os
from io import FileIO
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows: temporary files of killed processes stay
    fcntl = None  # type: ignore[assignment]

__all__ = ["make_folder", "open_temporary", "remove_quietly", "remove_stale", "sync_file", "sync_folder"]

logger = logging.getLogger(__name__)

_MARK = ".tmp-"
_LONGEST_NAME = 150  # of 255 bytes that file systems allow


def make_folder(folder: Path) -> None:
    """Make a folder and its parents, so that they survive a power cut."""
    new = [parent for parent in (folder, *folder.parents) if not parent.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for parent in reversed(new):
        sync_folder(parent.parent)


def open_temporary(target: Path) -> tuple[FileIO, Path]:
    """Return a new, locked file beside `target`, open for reading and writing, and its path.

    The kernel drops the lock when the process ends, however it ends: so the next save knows what is stale.
    """
    stem = target.name.encode()[:_LONGEST_NAME].decode(errors="ignore")
    while True:
        path = target.with_name(f".{stem}{_MARK}{os.getpid()}-{os.urandom(4).hex()}")
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | getattr(os, "O_CLOEXEC", 0), 0o666)
        file = FileIO(descriptor, "r+")
        # Another process that looks for stale files may have locked or removed it in between.
        if _lock(descriptor) is not False and path.exists():
            return file, path
        file.close()
        remove_quietly(path)


def remove_stale(folder: Path) -> None:
    """Remove temporary files that killed processes have left in a folder."""
    if fcntl is None:
        return
    for name in os.listdir(folder):
        if not name.startswith(".") or _MARK not in name:
            continue
        path = folder / name
        try:
            with open(path, "rb") as file:
                if _lock(file.fileno()) is True:
                    path.unlink()
                    logger.info("removed %s, which an interrupted save had left", path)
        except OSError as error:  # somebody else's file, or gone already: it does not stop this save
            logger.debug("left %s: %s", path, error)


def remove_quietly(path: Path) -> None:
    """Remove a temporary file; a failure is logged, since an error is already on its way."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        logger.warning("cannot remove the unfinished file %s: %s", path, error)


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


def _lock(descriptor: int) -> bool | None:
    """Lock an open file: True done, False another process holds it, None this file system has no locks."""
    if fcntl is None:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True
