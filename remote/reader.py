"""`RemoteReader`: a copy on this machine of what is read of runs at a URL, brought up to date again and again."""

from __future__ import annotations

import atexit
import fnmatch
import os
import posixpath
import shutil
import tempfile
from collections.abc import Collection
from contextlib import nullcontext
from pathlib import Path

from .refresh import refresh_file
from .store import RemoteFile, RemoteStore, check_protocol, explained, grown_files

_TRIES = 3
_MOST_COPIED = 1 << 25


class RemoteReader:
    """Copies some files of a remote folder; of others it copies only name, size and time.

    Args:
        url: Of the folder.
        patterns: Shell patterns of the names of files or folders whose content is copied.
        large: Shell patterns of files or folders from which only the newest file is copied, if it has at most 32 MiB;
            the others become files of the same size without content, which take no space.

    Raises:
        MissingDependency: The protocol needs a package that is not installed.
        ConfigError: The protocol is unknown.
    """

    def __init__(self, url: str, patterns: Collection[str], large: Collection[str] = ()) -> None:
        check_protocol(url, "the directory of a run")
        self.url = url.rstrip("/")
        self._store = RemoteStore(url)
        self._patterns = patterns
        self._large = large
        self._placeholders: set[Path] = set()
        self._known: dict[str, object] = {}
        self._temporary = tempfile.mkdtemp(prefix="loopwright-read-")
        atexit.register(shutil.rmtree, self._temporary, ignore_errors=True)
        self.folder = Path(self._temporary, posixpath.basename(self.url) or "root")
        """The copy; its last name is that of the remote folder."""
        self.folder.mkdir()

    def exists(self) -> bool:
        """Whether something is there."""
        with explained(self.url):
            return bool(self._store.names())

    def is_placeholder(self, path: Path) -> bool:
        """Whether a file of the copy is without its content."""
        return path in self._placeholders

    def shown(self, text: str) -> str:
        """Return text with the addresses of the remote files in place of those of their copies."""
        return text.replace(str(self.folder), self.url)

    def refresh(self) -> None:
        """Read what is new.

        Raises:
            ConfigError: The store cannot be read, or the folder changes faster than it can be read.
        """
        for tried in range(1, _TRIES + 1):
            try:
                with explained(self.url) if tried == _TRIES else nullcontext():
                    self._refresh()
            except OSError:  # a file was replaced after it was listed
                if tried == _TRIES:
                    raise
            else:
                return

    def _refresh(self) -> None:
        found = grown_files(self._store.files().values())
        large = [pieces[0] for name, pieces in found.items() if self._is_named(name, self._large)]
        newest = max(large, key=lambda file: file.modified, default=None)
        for name, pieces in found.items():
            # Hidden ones are claims and unfinished writes.
            if any(part.startswith(".") for part in name.split("/")) or self._known.get(name) == pieces:
                continue
            target = os.path.join(self.folder, *name.split("/"))
            if self._is_named(name, self._large) and not (pieces[0] is newest and newest.size <= _MOST_COPIED):
                _make_placeholder(target, pieces[0])
                self._placeholders.add(Path(target))
            elif self._is_named(name, (*self._patterns, *self._large)):
                refresh_file(self._store, pieces, target)
                os.utime(target, (pieces[-1].modified, pieces[-1].modified))
                self._placeholders.discard(Path(target))
            self._known[name] = pieces
        for name in self._known.keys() - found.keys():
            del self._known[name]
            Path(self.folder, *name.split("/")).unlink(missing_ok=True)

    @staticmethod
    def _is_named(name: str, patterns: Collection[str]) -> bool:
        return any(fnmatch.fnmatchcase(part, pattern) for part in name.split("/") for pattern in patterns)


def _make_placeholder(target: str, file: RemoteFile) -> None:
    os.makedirs(os.path.dirname(target), exist_ok=True)
    with open(target, "wb") as placeholder:
        placeholder.truncate(file.size)  # takes no space
    os.utime(target, (file.modified, file.modified))
