"""`RunFolder`: the folder of one run, on this machine or at a URL, whose version is taken when it is first read."""

from __future__ import annotations

import contextlib
import os
import re
import threading
from typing import TYPE_CHECKING

from ..errors import ConfigError
from ..files import lock_file
from ..remote import is_url
from .base import Lock, current_rank

if TYPE_CHECKING:
    from ..remote.mirror import RemoteFolder

# Folders that this process logs to, by device and number (they may be moved): the open, locked folder, and how many
# RunFolders use it. The kernel drops the lock when the process ends, however it ends.
_held: dict[tuple[int, int], tuple[int, int]] = {}
_held_lock = threading.Lock()

_VERSION_FOLDER = re.compile(r"version_(\d+)")


class RunFolder:
    """One run's folder, `save_dir/name/version_N`, whose number is taken at the first access.

    Two loggers share a folder by holding the same RunFolder.

    Args:
        save_dir: Directory, in which `~` and environment variables are expanded, or URL that fsspec understands.
        name: Name of the experiment; None or "": no directory for it.
        version: Number N for `version_N`, or a text that is used as it is; None: the next free number.
        remote: The folder at the URL, if another RunFolder has it already.

    Raises:
        ConfigError: The URL's protocol is unknown, or `version` is not of these types.
        MissingDependency: The URL's protocol needs a package that is not installed.
    """

    def __init__(
        self,
        save_dir: str | os.PathLike[str],
        name: str | None,
        version: int | str | None,
        *,
        remote: RemoteFolder | None = None,
    ) -> None:
        text = os.path.expandvars(os.path.expanduser(os.fspath(save_dir)))
        if is_url(text):
            self.remote: RemoteFolder | None = remote or _open_remote(text)
        else:
            self.remote = None
            text = text.removeprefix("file://").removeprefix("local://")
        is_number = isinstance(version, int) and not isinstance(version, bool) and version >= 0
        if not (version is None or is_number or isinstance(version, str)):
            raise ConfigError(
                f"version={version!r} is of type {type(version).__name__}; expected a number from 0, a string or None.",
                fix="pass version=3 for the folder 'version_3', version='name' for 'name', or leave it out.",
            )
        self.save_dir = text
        self.name = name or ""
        self.root_dir = os.path.join(text, self.name) if self.name else text
        self.requested_version = version
        self.known_rank: int | None = None
        self._version = version
        self._is_claimed = False
        self._held_place: tuple[int, int] | None = None
        self._fetched: set[str] = set()
        self._lock = Lock()  # loggers that share the folder may write on threads of their own

    @property
    def is_resolved(self) -> bool:
        """Whether the version is known already; if not, reading it takes the next free number."""
        return self._version is not None

    @property
    def version(self) -> int | str:
        """The run's version. The first call makes the folder on rank zero, so that no other process takes it.

        On other ranks it is a guess until rank zero has sent its version.
        """
        with self._lock:
            if self._version is None:
                rank = current_rank() if self.known_rank is None else self.known_rank
                self._version = self._claim_next() if rank == 0 else self._next()
            return self._version

    @property
    def path(self) -> str:
        """Directory of the run."""
        return self.path_of(self.version)

    def path_of(self, version: int | str) -> str:
        """Return the directory that a version has here."""
        return os.path.join(self.root_dir, version if isinstance(version, str) else f"version_{version}")

    def local(self, path: str) -> str:
        """Return where a path in this folder is on this machine: itself, or the copy of what is at a URL.

        What an earlier run wrote there is copied to this machine first.
        """
        if self.remote is None:
            return path
        with self._lock:
            if path not in self._fetched and not (self._is_claimed and path.startswith(self.path)):
                self.remote.fetch(path)
            self._fetched.add(path)
        return self.new_local(path)

    def new_local(self, path: str) -> str:
        """Return where a path in this folder is on this machine, without what an earlier run wrote there."""
        return path if self.remote is None else self.remote.local_path(path)

    @property
    def is_held(self) -> bool:
        """Whether this process, or the one that pickled this, keeps others from logging here."""
        return self._held_place is not None

    def hold(self) -> bool:
        """Make the folder, and keep other processes from logging here until `release`; False if one logs here."""
        if self.remote is not None:
            return True
        os.makedirs(self.path, exist_ok=True)
        place = _place(self.path)
        with _held_lock:
            known, users = _held.get(place, (None, 0))
            descriptor = _open_locked(self.path) if known is None else known
            if descriptor is None:
                return False
            _held[place] = (descriptor, users + 1)
        self._held_place = place
        return True

    def release(self) -> None:
        """Let other processes log here."""
        place, self._held_place = self._held_place, None
        with _held_lock:
            if place not in _held:
                return
            descriptor, users = _held.pop(place)
            if users > 1:
                _held[place] = (descriptor, users - 1)
            else:
                os.close(descriptor)

    def is_in_use(self, version: int | str) -> bool:
        """Whether another process is logging to the folder of a version."""
        path = self.path_of(version)
        if self.remote is not None or not os.path.isdir(path) or _place(path) in (self._held_place, *_held):
            return False
        descriptor = _open_locked(path)
        if descriptor is not None:
            os.close(descriptor)
        return descriptor is None

    def continue_in(self, version: int | str) -> None:
        """Use the folder of an earlier run; an empty one that this process created is removed."""
        if self._version != version:
            self.release()
        if self._is_claimed and self._version != version:
            if self.remote is not None:
                self.remote.give_back()
            else:
                with contextlib.suppress(OSError):  # not empty, or missing: it must not be removed
                    os.rmdir(self.path)
            self._is_claimed = False
        self._version = version

    def fresh(self) -> RunFolder:
        """Return a folder with the same arguments that has no version yet, unless one was requested."""
        return self.with_version(self.requested_version)

    def with_version(self, version: int | str | None) -> RunFolder:
        """Return a folder for another run of the same experiment."""
        return self.with_name(self.name, version)

    def with_name(self, name: str, version: int | str | None) -> RunFolder:
        """Return a folder for a run of another experiment."""
        folder = RunFolder(self.save_dir, name, version, remote=self.remote)
        folder.known_rank = self.known_rank
        return folder

    def _next(self) -> int:
        if self.remote is not None:
            names = list(self.remote.names(self.root_dir))
        elif not os.path.isdir(self.root_dir):
            return 0
        else:
            names = os.listdir(self.root_dir)
        found = (_VERSION_FOLDER.fullmatch(entry) for entry in names)
        return max((int(match[1]) for match in found if match), default=-1) + 1

    def _claim_next(self) -> int:
        if self.remote is not None:
            version = self._next()
            while not self.remote.claim(self.path_of(version)):
                version = max(version + 1, self._next())
            self._is_claimed = True
            return version
        os.makedirs(self.root_dir, exist_ok=True)
        version = self._next()
        while True:
            try:
                os.mkdir(self.path_of(version))  # atomic: of two processes that try, one gets the number
            except FileExistsError:
                version += 1
            else:
                self._is_claimed = True
                return version


def _place(path: str) -> tuple[int, int]:
    found = os.stat(path)
    return found.st_dev, found.st_ino


def _open_locked(path: str) -> int | None:
    """Return a folder, opened and locked; None if another process has locked it."""
    descriptor = os.open(path, os.O_RDONLY)
    if lock_file(descriptor) is False:
        os.close(descriptor)
        return None
    return descriptor


def _forget_held() -> None:
    """Leave the locks to the process that was forked: a worker that outlives it must not keep them."""
    global _held_lock  # another thread may have had it
    _held_lock = threading.Lock()
    for descriptor, _ in _held.values():
        os.close(descriptor)
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_held)


def _open_remote(url: str) -> RemoteFolder:
    from ..remote.mirror import RemoteFolder  # not imported where all folders are local

    return RemoteFolder(url)
