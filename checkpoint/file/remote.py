"""Checkpoints at URLs, through fsspec.

A remote store has no fsync, and its files cannot be changed in place: a checkpoint is written to a local temporary
folder (TMPDIR), uploaded under a temporary key, compared, and moved.
"""

from __future__ import annotations

import errno
import logging
import os
import posixpath
import re
from contextlib import suppress
from pathlib import Path
from typing import IO, cast
from urllib.parse import unquote

from ...errors import CheckpointError, ConfigError, MissingDependency
from ...protocols import StorageOptions

logger = logging.getLogger(__name__)

_TAIL_BYTES = 4096
_RANDOM = re.compile("[0-9a-f]{8}")  # ends the name of a temporary file
_LOCAL_SCHEMES = ("file://", "local://")


def as_local(path: str | Path) -> Path | None:
    """Return the local path that a path or URL names, or None for a remote one."""
    text = str(path)
    for scheme in _LOCAL_SCHEMES:
        if text.startswith(scheme):
            return Path(unquote(text[len(scheme) :]))
    return None if isinstance(path, str) and ("://" in path or "::" in path) else Path(path).expanduser()


class Remote:
    """One file of a remote store.

    Args:
        url: Address that fsspec understands.
        options: Arguments of the file system: credentials, endpoints.

    Raises:
        MissingDependency: The protocol needs a package that is not installed.
        CheckpointError: The protocol is unknown.
        ConfigError: The protocol's package does not accept its settings: no credentials, for example.
    """

    def __init__(self, url: str, options: StorageOptions | None = None) -> None:
        from fsspec import get_filesystem_class
        from fsspec.core import url_to_fs

        from ...remote.store import explained, package_of

        try:
            get_filesystem_class(re.split("::|://", url)[0])
        except ImportError as error:
            package = package_of(url.partition("://")[0])
            raise MissingDependency(package, needed_for=f"the checkpoint path {url!r}") from error
        except ValueError as error:
            raise CheckpointError(
                f"the checkpoint path {url!r} cannot be understood: {error}.",
                fix="pass a local path, or a URL of a protocol that fsspec knows, such as s3://bucket/run.ckpt.",
            ) from error
        with explained(url):
            self._store, self._key = url_to_fs(url, **(options or {}))
        self.url = url

    def exists(self) -> bool:
        """Return whether there is such a file; False, too, where most stores do not say."""
        from ...remote.store import explained

        with explained(self.url):
            return bool(self._store.isfile(self._key))

    def check_readable(self) -> None:
        """Refuse a store that cannot say whether the file is there.

        Raises:
            ConfigError: Wrong credentials, or no network.
        """
        from ...remote.store import explained

        with explained(self.url), suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError):
            self._store.info(self._key)

    def is_folder(self) -> bool:
        """Return whether the address is a folder."""
        from ...remote.store import explained

        with explained(self.url):
            return bool(self._store.isdir(self._key))

    def open(self) -> tuple[IO[bytes], int]:
        """Return the file, open for reading, and its size in bytes."""
        from ...remote.store import ExplainedFile, explained

        with explained(self.url):
            file, size = self._store.open(self._key, "rb"), int(self._store.size(self._key))
        return cast("IO[bytes]", ExplainedFile(file, self.url)), size

    def send(self, source: Path) -> None:
        """Put a local file there: under a temporary key first, then moved.

        Raises:
            OSError: What arrived is not what was sent; what was there before may be gone if the move failed.
        """
        from ...remote.store import make_folder

        folder, name = posixpath.split(self._key)
        start = f".{name}.tmp-"
        temporary = posixpath.join(folder, start + os.urandom(4).hex())
        make_folder(self._store, folder)
        try:
            self._store.put_file(str(source), temporary)
            self._compare(source, temporary)
            self._store.mv(temporary, self._key)
        except BaseException:
            if self._store.exists(temporary):
                self._store.rm_file(temporary)
            raise
        self._compare(source, self._key)
        self._remove_left(folder, start)

    def fetch(self, target: Path) -> None:
        """Copy the file to a local one.

        Raises:
            ConfigError: The store cannot be read, or there is no space for the copy.
        """
        from ...remote.store import explained

        with explained(self.url):
            try:
                self._store.get_file(self._key, str(target))
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                raise ConfigError(
                    f"{self.url!r} cannot be copied to {str(target.parent)!r}: {error.strerror}.",
                    fix="free space there, or set the environment variable TMPDIR to a folder on another disk.",
                ) from error

    def neighbours(self) -> list[str]:
        """Return the names of the files in the same folder."""
        from ...remote.store import explained

        folder = posixpath.dirname(self._key)
        with explained(self.url):
            if not self._store.isdir(folder):
                return []
            return [posixpath.basename(name) for name in self._store.ls(folder, detail=False)]

    def remove(self) -> None:
        """Remove the file."""
        self._store.rm_file(self._key)

    def _remove_left(self, folder: str, start: str) -> None:
        """Remove what killed saves to this address have left; only one program at a time saves to an address."""
        try:
            for name in self.neighbours():
                # Nothing more general: ".a.tmp-b.tmp-0123abcd" is of a save to another address, "a.tmp-b".
                if name.startswith(start) and _RANDOM.fullmatch(name, len(start)):
                    self._store.rm_file(posixpath.join(folder, name))
        except (
            Exception
        ) as error:  # each store has its own errors: not allowed to list, say; the checkpoint has arrived
            logger.warning("cannot remove what an interrupted save has left beside %s: %s", self.url, error)

    def _compare(self, source: Path, key: str) -> None:
        # The last bytes hold the digest of all headers and of every record's CRC.
        self._store.invalidate_cache()
        expected = source.stat().st_size
        found = int(self._store.size(key))
        if found != expected:
            raise OSError(f"{expected} bytes were sent, {found} bytes arrived")
        start = max(0, expected - _TAIL_BYTES)
        with self._store.open(key, "rb") as file, open(source, "rb") as own:
            file.seek(start)
            own.seek(start)
            if file.read() != own.read():
                raise OSError("what arrived differs from what was sent")
