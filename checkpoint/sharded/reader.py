"""Reading a checkpoint folder: `load` and `verify`.

No process group is needed, torch.distributed is not imported, and nothing that is read can be executed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

import torch
from torch import Tensor

from ...errors import CheckpointError
from ...protocols import Advance, MapLocation, StateDict, StorageOptions
from .. import storage, verified
from ..tensors import AnyTensor, StoredTensor
from .backends import LocalBackend, RemoteBackend, backend_of
from .manifest import MANIFEST, Manifest, damaged, decode
from .shard_files import ShardFiles, call_in_threads
from .stored import ShardedTensor
from .tree import put_back

if TYPE_CHECKING:
    from torch.types import Storage

# A save may replace the files while they are read: then the new checkpoint is read, so often at most.
_MOST_ATTEMPTS = 5

Backend = LocalBackend | RemoteBackend
ResultT = TypeVar("ResultT")

# The folder of the last `verify_share`, until the `load` that follows it: decoded and mapped already.
_verified: list[ShardFiles] = []


def load(
    path: str | Path,
    *,
    lazy: bool = False,
    map_location: MapLocation = None,
    weights_only: bool | None = True,
    verify: bool = True,
    storage_options: StorageOptions | None = None,
) -> StateDict:
    """Read a checkpoint folder in any process, without communication.

    Args:
        path: Folder or URL.
        lazy: Whether sharded tensors are returned as `StoredTensor`, to be read later in slices; else as full tensors.
            Tensors that were tied are one object.
        map_location: Device for the tensors, as in torch.load; tensors that are not read yet stay where they are.
        weights_only: As in storage.load: False unpickles `Trusted` objects, which can run any code.
        verify: Whether all bytes are compared with their checksums. Without it, the manifest, the sizes and headers of
            the files are, and the chunks that are read entirely.
        storage_options: Arguments of the remote file system.

    Raises:
        CheckpointNotFound: There is no folder with a manifest.
        CheckpointError: It is damaged; the message says which tensor and which file.
    """

    def read(files: ShardFiles) -> StateDict:
        return _load(
            files, str(path), storage_options,
            lazy=lazy, map_location=map_location, weights_only=weights_only, verify=verify,
        )  # fmt: skip

    return _with_manifest(path, storage_options, read)


def _load(
    files: ShardFiles,
    shown: str,
    storage_options: StorageOptions | None,
    *,
    lazy: bool,
    map_location: MapLocation,
    weights_only: bool | None,
    verify: bool,
) -> StateDict:
    backend, manifest = files.backend, files.manifest
    problems = list(files.frame_problems().values())
    if verify and not problems and (lazy or map_location is not None):  # then not all is read below
        problems = files.content_problems(files.not_compared())
    if problems:
        raise damaged(shown, problems)
    if lazy:  # what is mapped can be read when a newer save has removed it
        for name in {chunk.file for entry in manifest.tensors.values() for chunk in entry.chunks}:
            files.mapped(name)
    state = storage.load(
        backend.address(manifest.state),
        map_location=map_location,
        weights_only=weights_only,
        mmap=lazy,
        verify=verify,
        storage_options=storage_options,
    )
    stored = {name: ShardedTensor(name, entry, files, shown) for name, entry in manifest.tensors.items()}
    tensors: dict[str, AnyTensor] = dict(stored)
    if not lazy:
        try:
            read = call_in_threads(lambda tensor: read_to(tensor, map_location), list(stored.values()))
        except CheckpointError as error:  # name all that is wrong, not the first
            problems = files.content_problems()
            raise damaged(shown, problems) if problems else error from error
        tensors.update(zip(stored, read, strict=True))
    used: set[str] = set()
    unknown: list[str] = []
    loaded: StateDict = put_back(state, tensors, used, unknown)
    missing = [f"its state names the tensor {name!r}, which its manifest lacks" for name in unknown]
    missing += [
        f"its manifest has the tensor {name!r}, which its state does not name" for name in sorted(set(stored) - used)
    ]
    if missing:
        raise damaged(shown, missing)
    return loaded


def read_manifest(path: str | Path, storage_options: StorageOptions | None = None) -> Manifest:
    """Return what is in a checkpoint folder, without reading the rest of it.

    Raises:
        CheckpointNotFound: There is no folder with a manifest.
        CheckpointError: The manifest is damaged, or of a newer version.
    """
    return _read_manifest(_resolved(path, storage_options), str(path))


def _resolved(path: str | Path, storage_options: StorageOptions | None) -> Backend:
    """Return the folder; of a link, what it leads to now: it may lead to a newer checkpoint soon."""
    backend = backend_of(path, storage_options)
    return LocalBackend(backend.folder.resolve()) if isinstance(backend, LocalBackend) else backend


def _read_manifest(backend: Backend, shown: str) -> Manifest:
    return decode(_manifest_bytes(backend, shown), shown)


def _manifest_bytes(backend: Backend, shown: str) -> bytes:
    try:
        return backend.read(MANIFEST)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise verified.CheckpointNotFound(
            f"there is no sharded checkpoint at {shown!r}: no {MANIFEST} in a folder of that name.",
            fix="pass the path of a checkpoint folder whose save has finished.",
        ) from error
    except OSError as error:
        raise verified.cannot_read(backend.address(MANIFEST), error) from error


def _open(backend: Backend, shown: str) -> ShardFiles:
    """Return the files of a folder: those that `verify_share` has opened, if the manifest is still the same."""
    content = _manifest_bytes(backend, shown)
    with contextlib.suppress(IndexError):  # none was verified, or another thread has taken it
        opened = _verified.pop()
        if opened.is_of(backend, content):
            return opened
    return ShardFiles(backend, decode(content, shown), content)


def verify(
    path: str | Path, storage_options: StorageOptions | None = None, *, advance: Advance | None = None
) -> verified.Verified:
    """Read every byte of a checkpoint folder once and compare it with its checksum; nothing is executed.

    Args:
        path: Folder or URL.
        storage_options: Arguments of the remote file system.
        advance: Called with the number of bytes whenever some were read, in whatever thread reads.

    Raises:
        CheckpointNotFound: There is no folder with a manifest.
        CheckpointError: A file is missing, truncated or altered; names the files, and the tensors that are concerned.
    """

    def compare(files: ShardFiles) -> verified.Verified:
        entries = _verify_files(files, str(path), storage_options, advance=advance)
        entries += sum(len(entry.chunks) for entry in files.manifest.tensors.values())
        size_bytes = sum(entry.size for entry in files.manifest.files.values()) + files.backend.size(MANIFEST)
        return verified.Verified(sealed=True, size_bytes=size_bytes, entries=entries)

    return _with_manifest(path, storage_options, compare)


def verify_share(path: str | Path, rank: int, size: int, storage_options: StorageOptions | None = None) -> None:
    """Verify the manifest, and of the other files each `size`-th, so that `size` processes read each of them once.

    Raises:
        CheckpointNotFound: There is no folder with a manifest.
        CheckpointError: One of these files is missing, truncated or altered.
    """

    _verified.clear()

    def compare(files: ShardFiles) -> None:
        # A rank of as many as have written gets the file that it will read, and need not compare it again.
        shards = sorted(set(files.manifest.files) - {files.manifest.state})
        names = [*shards, files.manifest.state]
        _verify_files(files, str(path), storage_options, only=set(names[rank::size]), num_sharing=size)
        _verified.append(files)

    _with_manifest(path, storage_options, compare)


def _verify_files(
    files: ShardFiles,
    shown: str,
    storage_options: StorageOptions | None,
    only: set[str] | None = None,
    num_sharing: int = 1,
    advance: Advance | None = None,
) -> int:
    """Compare files with their checksums; return the number of entries in the state file, if it is among them.

    Args:
        files: Files of the folder.
        shown: Name of the checkpoint in messages.
        storage_options: Arguments of the remote file system.
        only: Names of files; those that this process has compared are left out. None is all files.
        num_sharing: Processes on this machine that do so at the same time.
        advance: See `verify`.
    """
    state = files.manifest.state
    names = set(files.manifest.files) if only is None else only
    broken = files.frame_problems(names)
    names = names - set(broken)
    to_read = names if only is None else names & files.not_compared()
    problems = [*broken.values(), *files.content_problems(to_read, num_sharing=num_sharing, advance=advance)]
    entries = 0
    if state in names:
        try:
            entries = verified.verify(files.backend.address(state), storage_options, advance=advance).entries
        except CheckpointError as error:
            problems.append(error.what)
    if problems:
        raise damaged(shown, problems)
    return entries


def _with_manifest(
    path: str | Path, storage_options: StorageOptions | None, function: Callable[[ShardFiles], ResultT]
) -> ResultT:
    """Call a function with the files of a checkpoint; again with the new ones, if a save has replaced them meanwhile.

    Raises:
        CheckpointError: Raised by the function for files that were not replaced; or they were, again and again.
    """
    for _ in range(_MOST_ATTEMPTS):
        backend = _resolved(path, storage_options)
        files = _open(backend, str(path))
        try:
            return function(files)
        except (CheckpointError, FileNotFoundError) as error:
            if not _is_replaced(path, storage_options, files.manifest):
                raise
            failure = error
    raise CheckpointError(
        f"the checkpoint {str(path)!r} was replaced {_MOST_ATTEMPTS} times while it was read.",
        fix="read it when no program saves to this path, or copy it first.",
    ) from failure


def _is_replaced(path: str | Path, storage_options: StorageOptions | None, manifest: Manifest) -> bool:
    """Return whether another checkpoint is at the path than that of this manifest."""
    try:
        return _read_manifest(_resolved(path, storage_options), str(path)) != manifest
    except CheckpointError:  # it is gone or damaged: what was seen before says more
        return False


def read_to(stored: StoredTensor, map_location: MapLocation) -> Tensor:
    """Return the full tensor on the device of map_location."""
    if isinstance(map_location, dict):
        map_location = map_location.get("cpu")
    if map_location is None:
        return stored.read()
    if not callable(map_location):
        if torch.device(map_location).type == "meta":
            return torch.empty(stored.shape, dtype=stored.dtype, device="meta")
        return stored.read().to(map_location)
    tensor = stored.read()
    moved = map_location(cast("Storage", tensor.untyped_storage()), "cpu")
    if moved is None:
        return tensor
    placed = torch.empty(0, dtype=tensor.dtype, device=moved.device)
    placed.set_(moved, 0, tensor.shape, tensor.stride())
    return placed
