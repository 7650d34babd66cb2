"""Reading a checkpoint folder: `load`, `verify`, and `StoredTensor`. Called by storage.py, verified.py and strategies.

No process group is needed, torch.distributed is not imported, and nothing that is read can be executed.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import product
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from ... import protocols
from ...errors import CheckpointError
from .. import storage, verified
from .manifest import MANIFEST, SEAL_DIGEST_SIZE, Chunk, Manifest, TensorEntry, damaged, decode, digest_of
from .places import LocalPlace, RemotePlace, place_of
from .shard_file import bytes_of
from .tree import put_back

__all__ = ["StoredTensor", "load", "read_manifest", "read_to", "verify", "verify_share"]

_PIECE = 16 << 20
# Below it, one read of a span with gaps is cheaper than a read for each run of bytes: a page, a request.
_LOCAL_RUN = 4 << 10
_REMOTE_RUN = 1 << 20

# Bytes are moved in dtypes of the same size, which all operations know.
_RAW = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}

_Place = LocalPlace | RemotePlace


class StoredTensor:
    """A tensor of a checkpoint folder that has not been read yet. It holds no file open.

    Saving over the folder, or removing it, removes what this would read.

    Attributes:
        shape: Of the whole tensor.
        dtype: Of its elements.
        path: Where it is in the checkpoint, such as "state_dict/layer.weight".
    """

    def __init__(self, path: str, entry: TensorEntry, place: _Place, shown: str) -> None:
        self.path = path
        self.shape = torch.Size(entry.shape)
        self.dtype = entry.torch_dtype
        self._entry = entry
        self._place = place
        self._shown = shown

    def __repr__(self) -> str:
        return f"<StoredTensor {self.path}: shape {tuple(self.shape)}, {self.dtype}, not read>"

    def read(self, offsets: Sequence[int] | None = None, sizes: Sequence[int] | None = None) -> Tensor:
        """Return a box of the tensor, on the CPU, in memory of its own.

        Only the bytes of the box are read, in pieces of at least a page (4 KiB; 1 MiB from a URL). The checksum of a
        chunk is compared if the box holds all of it.

        Args:
            offsets: First index in each dimension; None is 0 in each.
            sizes: Shape of the box; None is up to the end in each.

        Raises:
            CheckpointError: The file is missing or damaged.
            ValueError: The box does not lie within the tensor.
        """
        first = tuple(offsets) if offsets is not None else (0,) * len(self.shape)
        if sizes is None:
            sizes = [size - start for size, start in zip(self.shape, first, strict=False)]
        box = tuple(sizes)
        if not len(first) == len(box) == len(self.shape) or any(
            start < 0 or size < 0 or start + size > whole
            for start, size, whole in zip(first, box, self.shape, strict=True)
        ):
            raise ValueError(f"the box at {first} of size {box} does not lie within {self!r}")
        into = torch.empty(box, dtype=_RAW[self.dtype.itemsize])
        for chunk in self._entry.chunks:
            self._read_chunk(chunk, first, into)
        return into.view(self.dtype)

    def _read_chunk(self, chunk: Chunk, first: tuple[int, ...], into: Tensor) -> None:
        """Read what a chunk has of the box at `first`, whose memory is `into`."""
        starts = [max(a, b) for a, b in zip(chunk.offsets, first, strict=True)]
        ends = [min(a + m, b + n) for a, m, b, n in zip(chunk.offsets, chunk.sizes, first, into.shape, strict=True)]
        sizes = tuple(end - start for start, end in zip(starts, ends, strict=True))
        if any(size <= 0 for size in sizes):
            return
        part = into
        for dim, (start, size, origin) in enumerate(zip(starts, sizes, first, strict=True)):
            part = part.narrow(dim, start - origin, size)
        within = tuple(start - offset for start, offset in zip(starts, chunk.offsets, strict=True))
        try:
            with closing(self._place.open(chunk.file)) as file:
                crc = _read_box(file, chunk, within, part, _least_run(self._place))
        except FileNotFoundError as error:
            raise damaged(self._shown, [f"{chunk.file} is missing, with {self.path}"]) from error
        except EOFError as error:
            raise damaged(self._shown, [f"{chunk.file} is truncated, in {self.path}"]) from error
        except OSError as error:
            raise verified.cannot_read(self._place.address(chunk.file), error) from error
        if sizes == chunk.sizes and crc != chunk.crc32:
            raise damaged(self._shown, [_wrong_content(self.path, chunk)])


def load(
    path: str | Path,
    *,
    lazy: bool = False,
    map_location: Any = None,  # Any: as in torch.load
    weights_only: bool | None = True,
    verify: bool = True,
    storage_options: dict[str, Any] | None = None,  # Any: fsspec's own
) -> dict[str, Any]:
    """Read a checkpoint folder, in any process; nobody else needs to take part.

    Args:
        path: Folder or URL.
        lazy: Whether sharded tensors are given as `StoredTensor`, to be read later and in part; else as whole tensors.
            Tensors that were tied are one object.
        map_location: Where tensors go, as in torch.load; those that are not read yet stay where they are.
        weights_only: As in storage.load: False unpickles `Trusted` objects, which can run any code.
        verify: Whether all bytes are compared with their checksums. Without it, the manifest, the sizes and headers of
            the files are, and the chunks that are read whole.
        storage_options: Arguments of the remote file system.

    Raises:
        CheckpointNotFound: There is no folder with a manifest.
        CheckpointError: It is damaged; the message says which tensor and which file.
    """
    shown = str(path)
    place = _resolved(path, storage_options)
    manifest = _read_manifest(place, shown)
    problems = list(_frame_problems(place, manifest).values())
    if verify and not problems and (lazy or map_location is not None):  # then not all is read below
        problems = list(_content_problems(place, manifest))
    if problems:
        raise damaged(shown, problems)
    state = storage.load(
        place.address(manifest.state),
        map_location=map_location,
        weights_only=weights_only,
        mmap=lazy,
        verify=verify,
        storage_options=storage_options,
    )
    stored = {name: StoredTensor(name, entry, place, shown) for name, entry in manifest.tensors.items()}
    tensors: dict[str, Any] = dict(stored)  # Any: StoredTensor or Tensor
    if not lazy:
        for name, tensor in stored.items():
            try:
                tensors[name] = read_to(tensor, map_location)
            except CheckpointError as error:  # name all that is wrong, not the first
                problems = list(_content_problems(place, manifest))
                raise damaged(shown, problems) if problems else error from error
    used: set[str] = set()
    unknown: list[str] = []
    loaded: dict[str, Any] = put_back(state, tensors, used, unknown)
    missing = [f"its state names the tensor {name!r}, which its manifest lacks" for name in unknown]
    missing += [
        f"its manifest has the tensor {name!r}, which its state does not name" for name in sorted(set(stored) - used)
    ]
    if missing:
        raise damaged(shown, missing)
    return loaded


def read_manifest(path: str | Path, storage_options: dict[str, Any] | None = None) -> Manifest:  # Any: fsspec's own
    """Return what is in a checkpoint folder, without reading the rest of it.

    Raises:
        CheckpointNotFound: There is no folder with a manifest.
        CheckpointError: The manifest is damaged, or of a newer version.
    """
    return _read_manifest(_resolved(path, storage_options), str(path))


def _resolved(path: str | Path, storage_options: dict[str, Any] | None) -> _Place:  # Any: fsspec's own
    """Return the folder; of a link, what it leads to now: it may lead to a newer checkpoint soon."""
    place = place_of(path, storage_options)
    return LocalPlace(place.folder.resolve()) if isinstance(place, LocalPlace) else place


def _read_manifest(place: _Place, shown: str) -> Manifest:
    try:
        content = place.read(MANIFEST)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise verified.CheckpointNotFound(
            f"there is no sharded checkpoint at {shown!r}: no {MANIFEST} in a folder of that name.",
            fix="pass the path of a checkpoint folder whose save has finished.",
        ) from error
    except OSError as error:
        raise verified.cannot_read(place.address(MANIFEST), error) from error
    return decode(content, shown)


def verify(path: str | Path, storage_options: dict[str, Any] | None = None) -> verified.Verified:  # Any: fsspec's own
    """Read every byte of a checkpoint folder once and compare it with its checksum; nothing is executed.

    Raises:
        CheckpointNotFound: There is no folder with a manifest.
        CheckpointError: A file is missing, truncated or altered; names the files, and the tensors that are concerned.
    """
    place = _resolved(path, storage_options)
    manifest = _read_manifest(place, str(path))
    entries = _verify_files(place, manifest, str(path), storage_options)
    entries += sum(len(entry.chunks) for entry in manifest.tensors.values())
    size_bytes = sum(entry.size for entry in manifest.files.values()) + place.size(MANIFEST)
    return verified.Verified(sealed=True, size_bytes=size_bytes, entries=entries)


def verify_share(
    path: str | Path,
    rank: int,
    size: int,
    storage_options: dict[str, Any] | None = None,  # Any: fsspec's own
) -> None:
    """Verify the manifest, and of the other files each `size`-th, so that `size` processes read each of them once.

    Raises:
        CheckpointNotFound: There is no folder with a manifest.
        CheckpointError: One of these files is missing, truncated or altered.
    """
    place = _resolved(path, storage_options)
    manifest = _read_manifest(place, str(path))
    # By size, so that the shares are about equally large.
    names = sorted(manifest.files, key=lambda name: (-manifest.files[name].size, name))
    _verify_files(place, manifest, str(path), storage_options, only=set(names[rank::size]))


def _verify_files(
    place: _Place,
    manifest: Manifest,
    shown: str,
    storage_options: dict[str, Any] | None,  # Any: fsspec's own
    only: set[str] | None = None,
) -> int:
    """Compare files, by default all, with their checksums; return the number of entries in the state file, if read."""
    broken = _frame_problems(place, manifest, only)
    others = set() if only is None else set(manifest.files) - only
    problems = [*broken.values(), *_content_problems(place, manifest, without=others | set(broken))]
    entries = 0
    if manifest.state not in others | set(broken):
        try:
            entries = verified.verify(place.address(manifest.state), storage_options).entries
        except CheckpointError as error:
            problems.append(error.what)
    if problems:
        raise damaged(shown, problems)
    return entries


def _frame_problems(place: _Place, manifest: Manifest, only: set[str] | None = None) -> dict[str, str]:
    """Return what is wrong with the files as such, by name: presence, sizes, headers. Little is read.

    Args:
        place: The folder.
        manifest: Its manifest.
        only: The files to look at; None is all.
    """
    header_ends: dict[str, int] = {}
    for tensor in manifest.tensors.values():
        for chunk in tensor.chunks:
            header_ends[chunk.file] = min(chunk.start, header_ends.get(chunk.file, chunk.start))
    problems = {}
    for name, entry in manifest.files.items():
        if only is not None and name not in only:
            continue
        try:
            size = place.size(name)
            if size != entry.size:
                word = "truncated" if size < entry.size else "too long"
                problems[name] = f"{name} is {word}: it has {size} bytes of {entry.size}{_held(manifest, name)}"
                continue
            with closing(place.open(name)) as file:
                if name == manifest.state:
                    file.seek(max(0, size - SEAL_DIGEST_SIZE))
                    if _read_bytes(file, min(size, SEAL_DIGEST_SIZE)) != entry.digest.encode():
                        problems[name] = f"{name} is altered, or is not the one of this save"
                elif digest_of(_read_bytes(file, header_ends[name])) != entry.digest:
                    problems[name] = f"{name} has an altered header{_held(manifest, name)}"
        except FileNotFoundError:
            problems[name] = f"{name} is missing{_held(manifest, name)}"
        except (OSError, EOFError) as error:
            problems[name] = f"{name} cannot be read: {getattr(error, 'strerror', None) or error}"
    return problems


def _content_problems(place: _Place, manifest: Manifest, without: set[str] | None = None) -> Iterator[str]:
    """Yield which chunks do not match their checksum, reading each file from its beginning to its end."""
    by_file: dict[str, list[tuple[int, int, str, Chunk]]] = {}
    for path, entry in manifest.tensors.items():
        for chunk in entry.chunks:
            by_file.setdefault(chunk.file, []).append((chunk.start, entry.chunk_bytes(chunk), path, chunk))
    buffer = memoryview(bytearray(1 << 20))
    for name in sorted(set(by_file) - (without or set())):
        try:
            with closing(place.open(name)) as file:
                for start, size, path, chunk in sorted(by_file[name], key=lambda item: item[0]):
                    file.seek(start)
                    crc = 0
                    for begin in range(0, size, len(buffer)):
                        piece = buffer[: min(len(buffer), size - begin)]
                        _fill(file, piece)
                        crc = zlib.crc32(piece, crc)
                    if crc != chunk.crc32:
                        yield _wrong_content(path, chunk)
        except (OSError, EOFError) as error:
            yield f"{name} cannot be read: {getattr(error, 'strerror', None) or error}"


def _wrong_content(path: str, chunk: Chunk) -> str:
    return f"the content of {path} at {list(chunk.offsets)} in {chunk.file} does not match its checksum"


def _held(manifest: Manifest, file: str) -> str:
    """Return which tensors a file holds, as the end of a sentence."""
    held = [path for path, entry in manifest.tensors.items() if any(chunk.file == file for chunk in entry.chunks)]
    if not held:
        return ""
    more = f" and {len(held) - 3} more" if len(held) > 3 else ""
    return f" (it holds a part of {', '.join(held[:3])}{more})"


def read_to(stored: protocols.StoredTensor, map_location: Any) -> Tensor:  # Any: as in torch.load
    """Return a whole tensor where map_location says."""
    if isinstance(map_location, dict):
        map_location = map_location.get("cpu")
    if map_location is None:
        return stored.read()
    if not callable(map_location):
        if torch.device(map_location).type == "meta":
            return torch.empty(stored.shape, dtype=stored.dtype, device="meta")
        return stored.read().to(map_location)
    tensor = stored.read()
    moved = map_location(tensor.untyped_storage(), "cpu")
    if moved is None:
        return tensor
    placed = torch.empty(0, dtype=tensor.dtype, device=moved.device)
    placed.set_(moved, 0, tensor.shape, tensor.stride())
    return placed


def _least_run(place: _Place) -> int:
    return _LOCAL_RUN if isinstance(place, LocalPlace) else _REMOTE_RUN


def _read_box(file: IO[bytes], chunk: Chunk, within: tuple[int, ...], into: Tensor, least_run: int) -> int:
    """Read a box of a chunk.

    Args:
        file: The shard file.
        chunk: What is read from.
        within: First index of the box in the chunk.
        into: Receives the box; its shape is the box's.
        least_run: Bytes in a row that are worth a read of their own.

    Returns:
        The CRC-32 of the bytes, which is the chunk's if the box is all of it; else of no meaning.
    """
    item = into.element_size()
    row_bytes = math.prod(chunk.sizes[1:]) * item
    is_whole_rows = tuple(into.shape[1:]) == chunk.sizes[1:]
    if not into.ndim or (is_whole_rows and into.is_contiguous()):
        file.seek(chunk.start + (within[0] * row_bytes if within else 0))
        return _fill_checked(file, bytes_of(into))
    run_dim = max(dim for dim in range(into.ndim) if dim == 0 or into.shape[dim] != chunk.sizes[dim])
    run_bytes = math.prod(into.shape[run_dim:]) * item
    if run_dim and run_bytes >= least_run:
        _read_runs(file, chunk, within, into, run_dim)
        return 0
    # Rows of the first dimension follow each other in the file: some at a time, with what is not wanted of them.
    crc = 0
    step = max(1, _PIECE // max(1, row_bytes))
    for row in range(0, into.shape[0], step):
        count = min(step, into.shape[0] - row)
        rows = torch.empty((count, *chunk.sizes[1:]), dtype=into.dtype)
        file.seek(chunk.start + (within[0] + row) * row_bytes)
        crc = _fill_checked(file, bytes_of(rows), crc)
        for dim in range(1, into.ndim):
            rows = rows.narrow(dim, within[dim], into.shape[dim])
        into.narrow(0, row, count).copy_(rows)
    return crc


def _read_runs(file: IO[bytes], chunk: Chunk, within: tuple[int, ...], into: Tensor, run_dim: int) -> None:
    """Read a box of a chunk run by run: the bytes that follow each other from dimension `run_dim` on."""
    strides = [math.prod(chunk.sizes[dim + 1 :]) * into.element_size() for dim in range(into.ndim)]
    base = chunk.start + sum(start * stride for start, stride in zip(within, strides, strict=True))
    buffer = torch.empty(into.shape[run_dim:], dtype=into.dtype)
    for index in product(*(range(size) for size in into.shape[:run_dim])):
        file.seek(base + sum(position * stride for position, stride in zip(index, strides, strict=False)))
        part = into[index]
        run = part if part.is_contiguous() else buffer
        _fill(file, bytes_of(run))
        if run is buffer:
            part.copy_(buffer)


def _fill_checked(file: IO[bytes], target: memoryview, crc: int = 0) -> int:
    """Fill memory from a file and return its CRC-32."""
    for start in range(0, len(target), _PIECE):
        piece = target[start : start + _PIECE]
        _fill(file, piece)
        crc = zlib.crc32(piece, crc)
    return crc


def _fill(file: IO[bytes], target: memoryview) -> None:
    """Fill memory from a file.

    Raises:
        EOFError: It ends before.
    """
    while target:
        count = file.readinto(target)  # type: ignore[attr-defined]  # typeshed's IO lacks it
        if not count:
            raise EOFError(f"it ends {len(target)} bytes too early")
        target = target[count:]


def _read_bytes(file: IO[bytes], size: int) -> bytes:
    content = bytearray(size)
    _fill(file, memoryview(content))
    return bytes(content)
