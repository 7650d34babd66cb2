"""Formats of checkpoint folders, by name. The module of a format is imported when it is used.

A new format is one module with the functions of `FolderReader`, and one call of `register`. Files have one format of
their own, which storage.py reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from ..protocols import Advance, MapLocation, StateDict, StorageOptions
from .file.remote import Remote, as_local

if TYPE_CHECKING:
    from .verified import Verified


class FolderReader(Protocol):
    """The functions of a format's module. Each gets a path or URL, and the arguments of its file system."""

    def is_folder_checkpoint(self, path: str | Path, storage_options: StorageOptions | None = None, /) -> bool:
        """Return whether there is a folder of this format."""
        ...

    def identify(self, path: str | Path, storage_options: StorageOptions | None = None, /) -> str | None:
        """Return a fingerprint of the checkpoint; see `identity.identify`."""
        ...

    def load(
        self,
        path: str | Path,
        *,
        lazy: bool = False,
        map_location: MapLocation = None,
        weights_only: bool | None = True,
        verify: bool = True,
        storage_options: StorageOptions | None = None,
    ) -> StateDict:
        """Return the content; see `storage.load`."""
        ...

    def remove(self, path: str | Path, storage_options: StorageOptions | None = None, /) -> None:
        """Remove the folder; see `storage.remove`."""
        ...

    def verify(
        self,
        path: str | Path,
        storage_options: StorageOptions | None = None,
        /,
        *,
        advance: Advance | None = None,
    ) -> Verified:
        """Compare the folder with its checksums; see `verified.verify`."""
        ...

    def verify_share(
        self, path: str | Path, rank: int, size: int, storage_options: StorageOptions | None = None, /
    ) -> None:
        """Verify the share of one of `size` ranks; see `storage.verify_share`."""
        ...


@dataclass(frozen=True, slots=True)
class FolderFormat:
    """A registered format.

    Attributes:
        name: Such as "sharded".
        module: Dotted name of the module that reads it.
    """

    name: str
    module: str

    @property
    def reader(self) -> FolderReader:
        """The functions of the format, imported on first use."""
        return cast(FolderReader, import_module(self.module))


_formats: dict[str, FolderFormat] = {}


def register(name: str, module: str) -> None:
    """Register a format of checkpoint folders; formats are tried in the order of their registration.

    Args:
        name: Of the format; a registered one of this name is replaced.
        module: Dotted name of a module with the functions of `FolderReader`.
    """
    _formats[name] = FolderFormat(name, module)


def find_format(path: str | Path, storage_options: StorageOptions | None = None) -> FolderFormat | None:
    """Return the format of a folder; None for a file, a missing path, or a folder of an unknown format.

    A local file costs one look at the file system, and no format is imported for it.
    """
    local = as_local(path)
    if not local.is_dir() if local is not None else Remote(str(path), storage_options).exists():
        return None
    for candidate in _formats.values():
        if candidate.reader.is_folder_checkpoint(path, storage_options):
            return candidate
    return None


register("sharded", f"{__package__}.sharded")
register("deepspeed", f"{__package__}.deepspeed.reader")
