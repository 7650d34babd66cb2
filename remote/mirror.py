"""`RemoteFolder`: the folder of logs at a URL, with a copy on this machine that loggers write and this sends."""

from __future__ import annotations

import contextlib
import os
import posixpath
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.util import Finalize

from ..messages import warn
from .refresh import refresh_file
from .store import PART_BYTES, RemoteStore, check_protocol, grown_files, part_name

_EVERY_S = 15.0
_SHARE = 20  # an interval is at least this multiple of the time of the last transfer: it takes at most 5 % of the time
_CLAIM = ".claim-"
_EDGE = 4096
_GROWING = (".csv", ".jsonl")
# Files that loggers continue; a folder may also have checkpoints, which need not be fetched.
_CONTINUED = re.compile(r"metrics(\.\d+)?\.(csv|jsonl)|hparams(\.\d+)?\.yaml|.*\.tfevents\..*")


@dataclass
class _Sent:
    """What has arrived of one file.

    Attributes:
        version: Size and time of change of the local file then.
        size: Bytes that have arrived, parts included.
        base: Bytes of the file itself.
        open_part: Offset of the part that is sent again until it is full.
        parts: Names of the parts.
        edges: First and last bytes, by which a file that was rewritten differs from one that grew.
        is_continued: Whether the next bytes may follow these.
    """

    version: tuple[int, int]
    size: int
    base: int
    open_part: int
    parts: set[str] = field(default_factory=set)
    edges: tuple[bytes, bytes] = (b"", b"")
    is_continued: bool = True


class RemoteFolder:
    """Sends the files of a local folder to a URL: what is new of them, at intervals and on request.

    A file of up to a megabyte is sent as it is. A larger one is a base and parts (store.py) until it has doubled,
    or the run ends: sending costs as many bytes as were logged, times a constant, and at most a megabyte per call.

    Args:
        url: Of the folder that holds all runs.

    Raises:
        MissingDependency: The protocol needs a package that is not installed.
        ConfigError: The protocol is unknown.
    """

    def __init__(self, url: str) -> None:
        check_protocol(url, "save_dir")
        self.url = url
        self.every_s = _EVERY_S
        self._store = RemoteStore(url)
        self._lock = threading.RLock()  # held while something is sent
        self._place_lock = threading.RLock()
        self._local: str | None = None
        self._owner = -1
        self._sent: dict[str, _Sent] = {}
        self._claimed: str | None = None
        self._due_s = 0.0
        self._is_used = False

    def __getstate__(self) -> dict[str, object]:
        """Share the local files with the process that unpickles, which looks in the store for what has arrived."""
        fresh = {"_sent": {}, "_due_s": 0.0, "_is_used": False, "_lock": None, "_place_lock": None}
        return {**self.__dict__, "_local": self.local, **fresh}

    def __setstate__(self, state: dict[str, object]) -> None:
        """Take the state over, with separate locks."""
        self.__dict__.update(state)
        self._lock, self._place_lock = threading.RLock(), threading.RLock()

    @property
    def local(self) -> str:
        """Directory on this machine that is sent to the URL."""
        with self._place_lock:
            if self._local is None or not os.path.isdir(self._local):  # unpickled on another machine, say
                self._local = tempfile.mkdtemp(prefix="loopwright-logs-")
                self._owner = os.getpid()
                Finalize(None, self._end, exitpriority=10)  # after the loggers
            return self._local

    def local_path(self, url: str) -> str:
        """Return the local path of a file or folder below the URL, which will be sent."""
        self._is_used = True
        return os.path.join(self.local, *self._below(url).split("/"))

    def names(self, url: str) -> set[str]:
        """Return the names in a folder of the store; none if it is not there."""
        return self._store.names(self._below(url))

    def claim(self, url: str) -> bool:
        """Claim a folder; False if it has content or another process is claiming it.

        Stores have no operation that makes a folder for one process only. A mark is put there: if two processes do it
        at once, both see two marks and leave, so that no folder has two owners.
        """
        folder = self._below(url)
        mark = f"{folder}/{_CLAIM}{os.urandom(8).hex()}"
        self._store.mark(mark)
        if self._store.names(folder) == {posixpath.basename(mark)}:
            self._claimed = mark
            return True
        self._store.remove(mark)
        time.sleep(os.urandom(1)[0] / 5000)  # the other one does not come at the same moment again
        return False

    def why_unwritable(self) -> str:
        """Return why nothing can be written to the store; "" if it can. A small file is put there and removed."""
        name = f".trial-{os.urandom(8).hex()}"
        try:
            self._store.mark(name)
        except Exception as error:  # each store has its own errors
            return str(error) or type(error).__name__
        with contextlib.suppress(Exception):  # a store may allow writing and forbid removing
            self._store.remove(name)
        return ""

    def give_back(self) -> None:
        """Leave the folder that was taken, if nothing was sent there."""
        claimed = self._claimed
        self._remove_mark()
        if claimed is not None:
            self._store.remove_empty(posixpath.dirname(claimed))

    def _remove_mark(self) -> None:
        if self._claimed is not None:
            self._store.remove(self._claimed)
            self._claimed = None

    def fetch(self, url: str) -> None:
        """Copy what loggers wrote into a folder to this machine, to be continued."""
        folder = self._below(url)
        with self._lock:
            files = self._store.files(folder)
            for name, pieces in grown_files(files.values()).items():
                inner = name.removeprefix(folder).lstrip("/")
                if "/" in inner or not _CONTINUED.fullmatch(inner):
                    continue
                target = os.path.join(self.local, *name.split("/"))
                refresh_file(self._store, pieces, target)
                size = sum(piece.size for piece in pieces)
                parts = {other for other in files if other.startswith(f"{name}.part-")}
                self._sent[name] = _Sent(_version(target), size, size, size, parts, is_continued=False)

    def forget(self, url: str) -> None:
        """Send a file of this folder from its start when it changes next: it will not just grow."""
        with self._lock:
            for name, sent in self._sent.items():
                if name.startswith(f"{self._below(url)}/"):
                    sent.is_continued = False

    def send_if_due(self) -> None:
        """Send what is new if the interval since the last time is over.

        Raises:
            OSError: See `send`.
        """
        self._is_used = True
        if time.monotonic() >= self._due_s:
            self.send()

    def send(self, *, is_end: bool = False) -> None:
        """Send what is new, and remove what was removed.

        Args:
            is_end: Whether files become whole: without parts.

        Raises:
            OSError: Something did not arrive; a later call sends it.
        """
        if self._local is None:
            return
        with self._lock:
            start = time.monotonic()
            name = ""
            try:
                present = sorted(self._files())
                for name in present:
                    self._send_file(name, is_end=is_end)
                for name in sorted(self._sent.keys() - set(present)):
                    for each in (name, *self._sent[name].parts):
                        self._store.remove(each)
                    del self._sent[name]
                claimed = None if self._claimed is None else f"{posixpath.dirname(self._claimed)}/"
                if claimed is not None and any(name.startswith(claimed) for name in present):
                    self._remove_mark()  # the files hold the place now
            except Exception as error:  # each store has errors of its own, which share no base class
                raise OSError(
                    f"{self._store.address(name)} could not be sent: {type(error).__name__}: {error}"
                ) from error
            now = time.monotonic()
            self._due_s = now + max(self.every_s, _SHARE * (now - start))
            self._is_used = not is_end

    def _send_file(self, name: str, *, is_end: bool) -> None:
        path = os.path.join(self.local, *name.split("/"))
        version, sent = _version(path), self._sent.get(name)
        if sent is not None and sent.version == version and not (is_end and sent.parts):
            return
        size = version[0]
        if sent is None:  # an earlier run may have left parts that this process has not read
            sent = _Sent((-1, 0), 0, 0, 0, self._parts_of(name), is_continued=False)
        may_grow = sent.is_continued and not is_end and name.endswith(_GROWING)
        is_part = may_grow and size >= sent.size and PART_BYTES < size < 2 * sent.base
        if is_part and _edges(path, sent.size) == sent.edges:
            part = part_name(name, sent.base, sent.open_part)
            self._store.write(part, path, sent.open_part, size)
            sent.parts.add(part)
            if size - sent.open_part >= PART_BYTES:
                sent.open_part = size
        else:
            self._store.write(name, path, 0, size)
            for part in sorted(sent.parts):
                self._store.remove(part)
            sent = _Sent(version, size, size, size)
        sent.version, sent.size, sent.edges = version, size, _edges(path, size)
        self._sent[name] = sent

    def _parts_of(self, name: str) -> set[str]:
        if not name.endswith(_GROWING):
            return set()
        folder, last = posixpath.split(name)
        found = self._store.names(folder)
        return {posixpath.join(folder, other) for other in found if other.startswith(f"{last}.part-")}

    def _files(self) -> Iterator[str]:
        """Yield the local files, as paths below the folder with "/"."""
        root = self.local
        for folder, below, names in os.walk(root):
            below[:] = [name for name in below if not name.startswith(".")]
            for name in names:
                if not name.startswith(".") and not name.endswith(".tmp"):
                    yield os.path.relpath(os.path.join(folder, name), root).replace(os.sep, "/")

    def _below(self, url: str) -> str:
        return url.removeprefix(self.url).strip("/")

    def _end(self) -> None:
        """Send what a program without a Trainer has left, and remove the copy; keep it where that fails."""
        if self._local is None or self._owner != os.getpid():
            return
        try:
            if self._is_used:
                self.send(is_end=True)
        except OSError as error:
            warn(f"{error}. What was logged is in {self._local}.")
            return
        shutil.rmtree(self._local, ignore_errors=True)


def _version(path: str) -> tuple[int, int]:
    found = os.stat(path)
    return found.st_size, found.st_mtime_ns


def _edges(path: str, size: int) -> tuple[bytes, bytes]:
    with open(path, "rb") as file:
        first = file.read(min(size, _EDGE))
        file.seek(max(0, size - _EDGE))
        return first, file.read(min(size, _EDGE))
