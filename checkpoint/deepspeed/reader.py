"""Folders of DeepSpeed as a checkpoint format: the functions of `formats.FolderReader`."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from ...protocols import Advance, MapLocation, StateDict, StorageOptions
from ..file.remote import as_local
from ..verified import Verified, verify_as
from . import folder
from .files import checkpoint_files, is_deepspeed_folder


def is_folder_checkpoint(path: str | Path, storage_options: StorageOptions | None = None) -> bool:
    """Return whether a path is a local folder that DeepSpeed has saved."""
    local = as_local(path)
    return local is not None and is_deepspeed_folder(local)


def identify(path: str | Path, storage_options: StorageOptions | None = None) -> str | None:
    """Return None: the folder has no digest."""
    return None


def load(
    path: str | Path,
    *,
    lazy: bool = False,
    map_location: MapLocation = None,
    weights_only: bool | None = True,
    verify: bool = True,
    storage_options: StorageOptions | None = None,
) -> StateDict:
    """Return the content of a folder; see `storage.load`."""
    return folder.load(
        _local(path), map_location=map_location, lazy=lazy, is_safe=weights_only is not False, verify=verify
    )


def remove(path: str | Path, storage_options: StorageOptions | None = None) -> None:
    """Remove a link to a folder; the folder itself is an OSError, because Loopwright has not saved it."""
    local = _local(path)
    if local.is_symlink():
        local.unlink()
        return
    raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))


def verify(
    path: str | Path, storage_options: StorageOptions | None = None, *, advance: Advance | None = None
) -> Verified:
    """Compare the files that a load reads with their checksums; see `verified.verify`."""
    found = [verify_as(file, str(file), advance) for file in checkpoint_files(_local(path))]
    return Verified(False, sum(one.size_bytes for one in found), sum(one.entries for one in found))


def verify_share(path: str | Path, rank: int, size: int, storage_options: StorageOptions | None = None) -> None:
    """Verify each `size`-th file."""
    for file in checkpoint_files(_local(path))[rank::size]:
        verify_as(file, str(file))


def _local(path: str | Path) -> Path:
    local = as_local(path)
    assert local is not None, "folders of DeepSpeed are local ones"
    return local
