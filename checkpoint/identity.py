"""`identify`: a fingerprint of the checkpoint at a path, which changes when another one is saved there."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import IO

from ..protocols import StorageOptions
from .file.digest import read_file_digest
from .file.remote import Remote, as_local
from .formats import find_format


def identify(path: str | Path, storage_options: StorageOptions | None = None) -> str | None:
    """Return a fingerprint of a checkpoint. Reads a few bytes, whatever its size, and verifies nothing.

    Args:
        path: File, folder or URL.
        storage_options: Arguments of the remote file system.

    Returns:
        The digest at the end of a folder's manifest, or of a file. None if there is none (files of other programs), or
        if it cannot be read; then loading raises the error.
    """
    try:
        found = find_format(path, storage_options)
        if found is not None:
            return found.reader.identify(path, storage_options)
        with closing(_open(path, storage_options)) as file:
            return read_file_digest(file)
    except OSError:
        return None


def _open(path: str | Path, storage_options: StorageOptions | None) -> IO[bytes]:
    local = as_local(path)
    if local is None:
        return Remote(str(path), storage_options).open()[0]
    if not local.is_file():  # a pipe would block whoever opens it
        raise FileNotFoundError(path)
    return open(local, "rb")
