"""The disk where checkpoints go: room, speed, and whether writes are atomic."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from .finding import Finding, Level, show_size

_SECTION = "disk"
_PIECE = 8 << 20
_SLOW = 50e6  # bytes per second: a checkpoint of 1 GB holds training for 20 s
_LEAST_ROOM = 5 << 30
_ADVICE = {
    errno.ENOSPC: "make room, or choose another default_root_dir",
    errno.EDQUOT: "make room within your quota, or choose another default_root_dir",
    errno.EFBIG: "raise the limit on file sizes: ulimit -f unlimited",
    errno.EROFS: "choose another default_root_dir: this disk is mounted read-only",
}


def examine(folder: Path, size_bytes: int) -> Iterator[Finding]:
    """Yield findings about the disk of a folder; what is written there is removed."""
    folder = folder.absolute()
    made: list[Path] = []
    try:
        _make(folder, made)
        yield Finding(_SECTION, "folder", f"{folder}{_file_system(folder)}")
        usage = shutil.disk_usage(folder)
        yield judge_room(usage.free, usage.total)
        with tempfile.TemporaryDirectory(prefix=".loopwright-doctor-", dir=folder) as scratch:
            yield _links(Path(scratch))
            if size_bytes:
                yield from _speed(Path(scratch), min(size_bytes, max(usage.free // 2, _PIECE)))
    except OSError as error:
        advice = _ADVICE.get(error.errno or 0, "choose another default_root_dir, or change the folder's permissions")
        yield Finding(_SECTION, "writing", f"{type(error).__name__}: {error}", Level.PROBLEM, advice)
    finally:
        for one in reversed(made):
            one.rmdir()


def _make(folder: Path, made: list[Path]) -> None:
    """Make a folder and its missing parents, and add each new folder to `made`."""
    for one in reversed([one for one in (folder, *folder.parents) if not one.exists()]):
        one.mkdir()
        made.append(one)


_OF_ONE_MACHINE = ("apfs", "btrfs", "ext", "overlay", "ramfs", "squashfs", "tmpfs", "xfs", "zfs")


def judge_sharing(folder: Path, num_nodes: int) -> Finding:
    """Return whether the nodes share the folder, judged by the kind of its file system."""
    kind = _kind_of(folder.absolute())
    value = f"{folder.absolute()} on {kind or 'an unknown file system'}, for {num_nodes} nodes"
    if num_nodes == 1 or not kind.startswith(_OF_ONE_MACHINE):
        return Finding(_SECTION, "shared folder", value)
    advice = "choose a default_root_dir on a file system that all nodes share, or a URL: each node would have its own"
    return Finding(_SECTION, "shared folder", value, Level.WARNING, advice)


def judge_room(free: int, total: int) -> Finding:
    """Return whether there is room for checkpoints."""
    value = f"{show_size(free)} free of {show_size(total)}"
    if free >= _LEAST_ROOM:
        return Finding(_SECTION, "room", value)
    return Finding(
        _SECTION, "room", value, Level.WARNING, "a checkpoint is written beside the one that it replaces: make room"
    )


def _file_system(folder: Path) -> str:
    kind = _kind_of(folder)
    return f" ({kind})" if kind else ""


def _kind_of(folder: Path) -> str:
    """Return the kind of a folder's file system; "" if it is not known."""
    best, kind = "", ""
    try:
        lines = Path("/proc/self/mounts").read_text().splitlines()
    except OSError:
        lines = []  # another system than Linux
    for line in lines:
        _, place, found = line.split()[:3]
        place = place.replace("\\040", " ")
        if folder.is_relative_to(place) and len(place) >= len(best):
            best, kind = place, found
    return kind


def _links(scratch: Path) -> Finding:
    (scratch / "old").write_bytes(b"old")
    (scratch / "new").write_bytes(b"new")
    os.replace(scratch / "new", scratch / "old")
    is_intact = (scratch / "old").read_bytes() == b"new"
    try:
        os.link(scratch / "old", scratch / "linked")
        os.symlink("old", scratch / "symlinked")
    except OSError as error:
        value = f"files are replaced at once, but links cannot be made ({error.strerror})"
        return Finding(_SECTION, "replacing", value, Level.NOTE, "save_last='link' copies instead")
    value = "files are replaced at once, links work"
    if is_intact:
        return Finding(_SECTION, "replacing", value)
    return Finding(
        _SECTION, "replacing", "a replaced file has its old content", Level.PROBLEM, "use another file system"
    )


def _speed(scratch: Path, size_bytes: int) -> Iterator[Finding]:
    piece = os.urandom(_PIECE)  # nothing that a file system could compress
    path = scratch / "data"
    began = time.monotonic()
    with open(path, "wb") as file:
        for _ in range(max(1, size_bytes // _PIECE)):
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())
    yield judge_speed("writing", path.stat().st_size, time.monotonic() - began)
    _forget(path)
    began = time.monotonic()
    with open(path, "rb", buffering=0) as file:
        while file.read(_PIECE):
            pass
    yield judge_speed("reading", path.stat().st_size, time.monotonic() - began)
    began = time.monotonic()
    for number in range(10):
        with open(scratch / f"small-{number}", "wb") as file:
            file.write(b"loopwright")
            file.flush()
            os.fsync(file.fileno())
    yield Finding(_SECTION, "small files", f"{(time.monotonic() - began) * 100:.1f} ms to write and sync each")


def _forget(path: Path) -> None:
    """Let the kernel drop its copy of a file, so that reading it reads the disk."""
    if hasattr(os, "posix_fadvise"):
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def judge_speed(name: str, size_bytes: int, took_s: float) -> Finding:
    """Return whether writing this number of bytes in this time is fast enough for checkpoints."""
    speed = size_bytes / max(took_s, 1e-9)
    value = f"{speed / 1e6:.0f} MB/s ({show_size(size_bytes)})"
    if speed >= _SLOW:
        return Finding(_SECTION, name, value)
    advice = (
        "put checkpoints on a faster disk (default_root_dir), or save in the background: plugins=lw.AsyncCheckpointIO()"
    )
    return Finding(_SECTION, name, value, Level.WARNING, advice)
