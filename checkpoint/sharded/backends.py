"""Storage backends, folders on disk and at URLs: the operations that a checkpoint folder needs."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import shutil
import stat
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from typing import IO, cast

from ...files import remove_quietly
from ...protocols import StorageOptions
from ..file import disk
from ..file.disk import cannot_remove
from ..file.remote import Remote, as_local
from .manifest import FILE_DIGEST_SIZE, MANIFEST, FileEntry, read_digest
from .shard_file import Sink

# A file of a save; its token identifies the save.
OWN_NAME = re.compile(r"(?:state|shard)-(?P<token>[0-9a-f-]+?)(?:-[0-9]{5,}-of-[0-9]{5,})?\.(?:ckpt|safetensors)")

_BUFFER = 1 << 20


class LocalBackend:
    """A folder on disk.

    Args:
        folder: Its path; it need not be there yet.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def address(self, name: str) -> str:
        """Return the path of a file in it."""
        return str(self.folder / name)

    def names(self) -> set[str]:
        """Return the names in it; none if it is not there."""
        try:
            return set(os.listdir(self.folder))
        except (FileNotFoundError, NotADirectoryError):
            return set()

    def size(self, name: str) -> int:
        """Return the size of a file in bytes.

        Raises:
            OSError: It is not there, or is not a regular file.
        """
        found = os.stat(self.folder / name)
        if not stat.S_ISREG(found.st_mode):  # a pipe would block whoever opens it
            raise OSError(errno.EINVAL, "it is not a regular file", str(self.folder / name))
        return found.st_size

    def open(self, name: str) -> IO[bytes]:
        """Return a file, open for reading, without a buffer."""
        return open(self.folder / name, "rb", buffering=0)

    def read(self, name: str) -> bytes:
        """Return the content of a small file."""
        self.size(name)
        return (self.folder / name).read_bytes()

    @contextmanager
    def create(self, name: str) -> Iterator[Sink]:
        """Open a new file for writing; it is on the disk when this ends, or gone if that fails."""
        path = self.folder / name
        try:
            with io.FileIO(path, "xb") as file:
                writer = io.BufferedWriter(file, _BUFFER)
                try:
                    yield writer
                    writer.flush()
                    disk.sync_file(file.fileno())
                except BaseException:
                    file.close()  # else the writer would try once more to write when it is collected
                    raise
                writer.detach()
            disk.sync_folder(self.folder)
        except BaseException:
            if self.folder.is_dir():
                remove_quietly(path)
            raise

    def remove(self, names: set[str]) -> None:
        """Remove files; a failure is logged."""
        for name in sorted(names):
            remove_quietly(self.folder / name)


class RemoteBackend:
    """A folder at a URL, through fsspec.

    Args:
        url: URL of the folder.
        options: Arguments of the file system.

    Raises:
        MissingDependency: The protocol needs a package that is not installed.
        CheckpointError: The protocol is unknown.
    """

    def __init__(self, url: str, options: StorageOptions | None = None) -> None:
        self.url = url.rstrip("/")
        self.options = options
        self.remote = Remote(self.url, options)  # explains a protocol that cannot be used
        from fsspec.core import url_to_fs

        self._store, self._key = url_to_fs(self.url, **(options or {}))

    def address(self, name: str) -> str:
        """Return the URL of a file in it."""
        return f"{self.url}/{name}"

    def names(self) -> set[str]:
        """Return the names in it; none if it is not there."""
        self._store.invalidate_cache()
        try:
            with self._explained():
                found = self._store.ls(self._key, detail=False)
        except (FileNotFoundError, NotADirectoryError):
            return set()
        return {str(name).rstrip("/").rpartition("/")[2] for name in found}

    def size(self, name: str) -> int:
        """Return the size of a file in bytes.

        Raises:
            OSError: It is not there.
        """
        with self._explained(name):
            return int(self._store.size(self._path(name)))

    def open(self, name: str) -> IO[bytes]:
        """Return a file, open for reading."""
        from ...remote.store import ExplainedFile

        with self._explained(name):
            file: IO[bytes] = self._store.open(self._path(name), "rb")
        return cast("IO[bytes]", ExplainedFile(file, self.address(name)))

    def read(self, name: str) -> bytes:
        """Return the content of a small file."""
        with self._explained(name):
            return bytes(self._store.cat_file(self._path(name)))

    @contextmanager
    def create(self, name: str) -> Iterator[Sink]:
        """Open a new file for writing; it has arrived when this ends, or is gone if that fails."""
        self._make()
        try:
            with self._store.open(self._path(name), "wb") as file:
                yield file
        except BaseException:
            self._remove(name)
            raise

    def put(self, name: str, content: bytes) -> None:
        """Write a small file in one request, over what is there.

        Raises:
            OSError: Something else arrived.
        """
        self._make()
        self._store.pipe_file(self._path(name), content)
        self._store.invalidate_cache()
        if self.read(name) != content:
            raise OSError(errno.EIO, "what arrived differs from what was sent", self.address(name))

    def remove(self, names: set[str]) -> None:
        """Remove files; what is gone already is fine."""
        for name in sorted(names):
            self._remove(name)

    def remove_folder(self) -> None:
        """Remove the manifest, then all the rest."""
        self._remove(MANIFEST)
        if self._store.exists(self._key):
            self._store.rm(self._key, recursive=True)

    def _explained(self, name: str = "") -> AbstractContextManager[None]:
        from ...remote.store import explained

        return explained(self.address(name) if name else self.url)

    def _make(self) -> None:
        from ...remote.store import make_folder

        make_folder(self._store, self._key)

    def _path(self, name: str) -> str:
        return f"{self._key}/{name}"

    def _remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._store.rm_file(self._path(name))


def backend_of(path: str | Path, storage_options: StorageOptions | None = None) -> LocalBackend | RemoteBackend:
    """Return the folder that a path or URL names."""
    local = as_local(path)
    return RemoteBackend(str(path), storage_options) if local is None else LocalBackend(local)


def state_entry(backend: LocalBackend | RemoteBackend, name: str) -> FileEntry:
    """Return the manifest's entry of a state file that was written."""
    size = backend.size(name)
    with backend.open(name) as file:
        file.seek(size - FILE_DIGEST_SIZE)
        return FileEntry(size, file.read(FILE_DIGEST_SIZE).decode())


def is_folder_checkpoint(path: str | Path, storage_options: StorageOptions | None = None) -> bool:
    """Return whether a path or URL is a folder with a manifest: a sharded checkpoint whose save has finished."""
    local = as_local(path)
    if local is not None:
        return (local / MANIFEST).is_file()
    return Remote(f"{str(path).rstrip('/')}/{MANIFEST}", storage_options).exists()


def identify(path: str | Path, storage_options: StorageOptions | None = None) -> str | None:
    """Return the digest at the end of the manifest of a checkpoint folder; see `identity.identify`."""
    with closing(backend_of(path, storage_options).open(MANIFEST)) as file:
        return read_digest(file)


def remove(path: str | Path, storage_options: StorageOptions | None = None) -> None:
    """Remove a checkpoint folder with all that is in it; nothing happens if there is none.

    It is gone in one step, before its files are removed; what a kill in between leaves, the next save into the same
    parent folder removes. At a URL the manifest goes first. Of a link only the link is removed.

    Raises:
        CheckpointError: It is a folder without a manifest, or the system does not allow it.
    """
    local = as_local(path)
    try:
        if local is None:
            if is_folder_checkpoint(path, storage_options):
                RemoteBackend(str(path), storage_options).remove_folder()
        elif local.is_symlink():
            local.unlink()
        elif is_folder_checkpoint(local):
            hidden = local.with_name(f".tmp-{os.getpid()}-{os.urandom(4).hex()}.folder")
            os.rename(local, hidden)
            shutil.rmtree(hidden)
        elif local.exists():
            raise OSError(errno.EISDIR, f"it has no {MANIFEST}, so it is not a checkpoint folder", str(local))
    except OSError as error:
        raise cannot_remove(str(path), error) from error
