"""Files that take the place of others in one step, under temporary names that cannot be predicted.

A temporary file is new (an existing name or a link is never opened), in the folder of its target, and locked: the
kernel drops the lock when the process ends, so that the next one knows which of them were left.
"""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import os
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import IO

from .messages import warn

try:
    import fcntl
except ImportError:  # Windows: temporary files of killed processes stay
    fcntl = None  # type: ignore[assignment]

logger = logging.getLogger(__name__)

_MARK = ".tmp-"
_LONGEST_NAME = 150  # of 255 bytes that file systems allow
_NEW = os.O_CREAT | os.O_EXCL | os.O_RDWR | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0)


@contextlib.contextmanager
def only_describes(what: str) -> Iterator[None]:
    """Turn an OSError into a warning: what is written here describes a run, and must not fail it.

    Args:
        what: Begins the sentence, such as "The configuration".
    """
    try:
        yield
    except OSError as error:
        warn(f"{what} could not be written: {error}. The run is not affected.")


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """Open a new file that takes the place of `path` in one step at the end of the block.

    After an error, `path` is as it was, and no unfinished file is left. A link at `path` is replaced, not followed.

    Args:
        path: The file; its folder exists.

    Raises:
        OSError: The file cannot be written.
    """
    target = Path(path)
    _remove_stale_once(target.parent)
    raw, temporary = open_temporary(target)
    try:
        file = io.BufferedWriter(raw)
        yield file
        file.flush()
        if fcntl is None:
            raw.close()  # Windows renames no open file
        os.replace(temporary, target)  # while it is open: its lock says that it is not stale
    except BaseException:
        remove_quietly(temporary)
        raise
    finally:
        raw.close()


def append_whole(path: str | os.PathLike[str], data: bytes, *, creates: bool) -> None:
    """Append all of the bytes or, on a failure, none of them: half a row would damage the next one.

    Args:
        path: The file.
        data: What is appended.
        creates: Whether a missing file is created; else it is an error.

    Raises:
        OSError: The disk is full, or the file is not writable or missing.
    """
    # Unbuffered, so that an error comes here and not when the file is closed.
    with open(path, "ab" if creates else "r+b", buffering=0) as file:
        start = file.seek(0, os.SEEK_END)
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[file.write(rest) :]
        except OSError:
            file.truncate(start)
            raise


def replace_file(path: str | os.PathLike[str], text: str) -> None:
    """Write a small text file so that a reader sees the old content or the new one, never a part."""
    with replacing(path) as file:
        file.write(text.encode())


def open_temporary(target: Path) -> tuple[FileIO, Path]:
    """Return a new, locked file beside `target`, open for reading and writing, and its path."""
    stem = target.name.encode()[:_LONGEST_NAME].decode(errors="ignore")
    while True:
        path = target.with_name(f".{stem}{_MARK}{os.getpid()}-{os.urandom(8).hex()}")
        descriptor = os.open(path, _NEW, 0o666)
        file = FileIO(descriptor, "r+")
        # Another process that looks for stale files may have locked or removed it in between.
        if lock_file(descriptor) is not False and path.exists():
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
                if lock_file(file.fileno()) is True:
                    path.unlink()
                    logger.info("removed %s, which an interrupted save had left", path)
        except OSError as error:  # another user's file, or gone already: it does not stop this save
            logger.debug("left %s: %s", path, error)


@functools.cache
def _remove_stale_once(folder: Path) -> None:
    with contextlib.suppress(OSError):  # whether the folder can be written to is seen next
        remove_stale(folder)


def remove_quietly(path: Path) -> None:
    """Remove a temporary file; a failure is logged, since an error is already on its way."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        logger.warning("cannot remove the unfinished file %s: %s", path, error)


def lock_file(descriptor: int) -> bool | None:
    """Lock an open file or folder: True done, False another process holds it, None this file system has no locks."""
    if fcntl is None:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True
