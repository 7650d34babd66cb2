"""Reads folders of torch.distributed.checkpoint (DCP), as Lightning's sharded checkpoints are.

    .metadata        a pickle: which tensors there are, and in which file and at which byte each chunk of them begins
    __0_0.distcp     records of torch.save, one after the other, in one or more files for each rank

torch reads `.metadata` with pickle, which runs whatever it asks for. Here it is read by an unpickler that knows the
names of DCP's metadata classes, and makes inert records of them; anything else is refused.
"""

from __future__ import annotations

import io
import math
import pickle
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...errors import CheckpointError
from ...protocols import Advance, StateDict, Tree
from ..file.archive import Damaged
from ..file.digest import compare_checksums
from ..file.record_names import TooMuch, require_bounded
from ..file.restricted import refusing
from ..tensors import StoredTensor, narrow, overlap

METADATA = ".metadata"

_MODULE = "torch.distributed.checkpoint.metadata"
_SHARDED_MODULE = "torch.distributed._shard.sharded_tensor.metadata"  # before torch 2.2
_FIX = "copy the folder again from where it came, or read it with torch.distributed.checkpoint if you trust it."


class _Record:
    """Stand for an object of DCP's: its attributes, or the tuple that it was made of, and nothing else."""

    parts: tuple[Any, ...] = ()  # Any: whatever the pickle held

    def __init__(self, *parts: object) -> None:
        if parts:
            self.parts = parts

    def __setstate__(self, state: object) -> None:
        if isinstance(state, dict):
            self.__dict__.update({str(key): value for key, value in state.items()})
        elif isinstance(state, tuple):
            self.parts = state


class _Properties(_Record): ...


class _Chunk(_Record): ...


class _TensorMetadata(_Record): ...


class _BytesMetadata(_Record): ...


class _Index(_Record): ...


class _Place(_Record): ...


def _size(items: Sequence[int] = ()) -> tuple[int, ...]:
    return tuple(items)


def _layout(name: object) -> object:
    return name


def _path(*parts: object) -> str:
    return "/".join(map(str, parts))


_KNOWN: dict[tuple[str, str], Any] = {  # Any: classes and functions
    (_MODULE, "Metadata"): _Record,
    (_MODULE, "StorageMeta"): _Record,
    (_MODULE, "TensorStorageMetadata"): _TensorMetadata,
    (_MODULE, "BytesStorageMetadata"): _BytesMetadata,
    (_MODULE, "ChunkStorageMetadata"): _Chunk,
    (_MODULE, "TensorProperties"): _Properties,
    (_MODULE, "MetadataIndex"): _Index,
    (_MODULE, "_MEM_FORMAT_ENCODING"): _Record,
    (_SHARDED_MODULE, "TensorProperties"): _Properties,
    (_SHARDED_MODULE, "MEM_FORMAT_ENCODING"): _Record,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _Place,
    ("torch.serialization", "_get_layout"): _layout,
    ("torch", "Size"): _size,
    ("collections", "OrderedDict"): OrderedDict,
    **{("pathlib", name): _path for name in ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")},
    **{("pathlib._local", name): _path for name in ("PosixPath", "WindowsPath")},
}  # fmt: skip
_read_pickle = refusing(_KNOWN, buildable=(_Record, OrderedDict))


class DcpTensor(StoredTensor):
    """A tensor of a DCP folder that has not been read yet; its path is its name in the metadata."""

    def __init__(self, folder: DcpFolder, name: str, metadata: Any) -> None:  # Any: _TensorMetadata
        super().__init__(name, metadata.size, metadata.properties.parts[0])
        self._folder = folder
        self._chunks = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in metadata.chunks]
        volume = sum(math.prod(sizes) for _, sizes in self._chunks)
        is_within = all(
            len(offsets) == len(sizes) == len(self.shape)
            and all(o >= 0 and s >= 0 and o + s <= e for o, s, e in zip(offsets, sizes, self.shape, strict=True))
            for offsets, sizes in self._chunks
        )
        if not isinstance(self.dtype, torch.dtype) or not is_within or volume != self.shape.numel():
            raise folder.damaged(f"the chunks of {name!r} do not cover its shape {tuple(self.shape)}")
        if self.shape.numel() * self.dtype.itemsize > folder.size_bytes:
            raise folder.damaged(f"{name!r} has the shape {tuple(self.shape)}, more than the files have bytes")

    def _read(self, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
        into = torch.zeros(sizes, dtype=self.dtype)
        for chunk_offsets, chunk_sizes in self._chunks:
            common = overlap(chunk_offsets, chunk_sizes, offsets, sizes)
            if common is None:
                continue
            chunk = self._folder.read_record(self.path, chunk_offsets)
            if not isinstance(chunk, Tensor) or tuple(chunk.shape) != chunk_sizes or chunk.dtype != self.dtype:
                raise self._folder.damaged(
                    f"the chunk of {self.path!r} at {chunk_offsets} has another shape or dtype than its metadata"
                )
            starts, extent = common
            part = narrow(chunk, [start - at for start, at in zip(starts, chunk_offsets, strict=True)], extent)
            narrow(into, [start - at for start, at in zip(starts, offsets, strict=True)], extent).copy_(part)
        return into


class DcpFolder:
    """A folder of torch.distributed.checkpoint.

    Attributes:
        path: The folder.
        size_bytes: Bytes of its data files.

    Args:
        path: Local folder with a file `.metadata`.

    Raises:
        CheckpointError: The metadata are damaged, or hold anything but DCP's metadata; nothing in them was executed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size_bytes = sum(file.stat().st_size for file in path.iterdir() if file.is_file())
        try:
            with open(path / METADATA, "rb") as file:
                metadata = _read_pickle(file)
            self._entries: StateDict = dict(metadata.state_dict_metadata)
            self._paths: StateDict = dict(getattr(metadata, "planner_data", None) or {})
            self._places = {
                (index.fqn, tuple(index.offset) if getattr(index, "offset", None) is not None else None): place
                for index, place in metadata.storage_data.items()
            }
        except pickle.UnpicklingError as error:
            raise CheckpointError(
                f"{str(path / METADATA)!r} cannot be read safely: {error}. Nothing in it was executed.", fix=_FIX
            ) from error
        except OSError as error:
            raise self.damaged(f"{METADATA} cannot be read: {error.strerror or error}") from error
        except Exception as error:  # any bytes may stand here, and pickle documents no closed set of errors
            raise self.damaged(f"{METADATA} is malformed ({type(error).__name__}: {error})") from error

    @property
    def num_records(self) -> int:
        """Number of records in its data files."""
        return len(self._places)

    def damaged(self, problem: str) -> CheckpointError:
        """Return the error for a folder with a problem."""
        return CheckpointError(f"the folder {str(self.path)!r} is damaged: {problem}.", fix=_FIX)

    def tree(self, read_object: Callable[[io.BytesIO, str], Any]) -> StateDict:  # Any: tensors and objects, nested
        """Return what was saved, nested as it was; its tensors are not read.

        Args:
            read_object: Reads what torch.save has written of an object that is not a tensor; gets its path, too.
        """
        root: StateDict = {}
        for name, entry in self._entries.items():
            value: Tree = None
            if isinstance(entry, _TensorMetadata):
                value = self._tensor(name, entry)
            else:
                value = read_object(io.BytesIO(self._record(name, None)), name)
            steps = self._paths.get(name, (name,))
            if not isinstance(steps, tuple) or not steps or not all(isinstance(step, str | int) for step in steps):
                raise self.damaged(f"{name!r} has no place in the tree")
            _put(root, steps, value)
        return {key: _with_lists(value) for key, value in root.items()}

    def read_record(self, name: str, offset: tuple[int, ...]) -> Any:  # Any: a tensor, if the folder is intact
        """Return a chunk of a tensor."""
        try:
            record = io.BytesIO(self._record(name, offset))
            require_bounded(record)
            record.seek(0)
            return torch.load(record, map_location="cpu", weights_only=True)
        except (TooMuch, RuntimeError, pickle.UnpicklingError, EOFError, ValueError, KeyError) as error:
            if isinstance(error, CheckpointError):
                raise
            reason = str(error).partition("\n")[0][:200]
            raise self.damaged(f"the chunk of {name!r} at {offset} cannot be read: {reason}") from error

    def check(self, advance: Advance | None = None) -> list[str]:
        """Read every record and compare it with its checksums, where it has any; return what is wrong.

        Args:
            advance: Called with the number of bytes whenever a record was read.
        """
        problems = []
        for name, offset in self._places:
            try:
                raw = self._record(name, offset)
                if advance is not None:
                    advance(len(raw))
                if raw[:4] == b"PK\x03\x04" and compare_checksums(io.BytesIO(raw), len(raw)).altered:
                    problems.append(f"{self._shown(name, offset)} does not match its checksum")
            except (CheckpointError, Damaged) as error:
                problems.append(f"{self._shown(name, offset)}: {getattr(error, 'what', error)}")
        return problems

    def _shown(self, name: str, offset: tuple[int, ...] | None) -> str:
        return f"{name} at {offset} in {self._places[name, offset].relative_path}"

    def _tensor(self, name: str, entry: _TensorMetadata) -> DcpTensor:
        try:
            return DcpTensor(self, name, entry)
        except (AttributeError, TypeError, IndexError, ValueError, OverflowError) as error:
            raise self.damaged(f"the metadata of {name!r} are malformed ({error})") from error

    def _record(self, name: str, offset: tuple[int, ...] | None) -> bytes:
        place: Any = self._places.get((name, offset))  # Any: _Place
        if place is None and offset is not None and not any(offset):
            place = self._places.get((name, None))
        if place is None:
            raise self.damaged(f"there is no record of {name!r} at {offset}")
        file, start, length = place.relative_path, place.offset, place.length
        if not isinstance(file, str) or Path(file).name != file or file in ("", ".", ".."):
            raise self.damaged(f"the record of {name!r} is said to be in {file!r}, outside of the folder")
        if getattr(place, "transform_descriptors", None):
            raise CheckpointError(
                f"the record of {name!r} is stored with {place.transform_descriptors}, which is not supported.",
                fix="load it with torch.distributed.checkpoint and save it without extensions.",
            )
        try:
            size = (self.path / file).stat().st_size
            if not (type(start) is type(length) is int and start >= 0 and length >= 0 and start + length <= size):
                raise self.damaged(f"{file} has {size} bytes, and {name!r} should be at byte {start} with {length}")
            with open(self.path / file, "rb") as stream:
                stream.seek(start)
                return stream.read(length)
        except OSError as error:
            raise self.damaged(f"{file}, which has {name!r}, cannot be read: {error.strerror or error}") from error


def _put(root: dict[Any, Any], steps: tuple[str | int, ...], value: Tree) -> None:  # Any: see DcpFolder.tree
    for step in steps[:-1]:
        root = root.setdefault(step, _Branch())
    root[steps[-1]] = value


class _Branch(dict[Any, Any]):  # Any: see DcpFolder.tree
    """A part of the tree whose kind is not known yet: its keys are all ints where it was a list."""


def _with_lists(tree: Tree) -> Tree:
    if type(tree) is _Branch:
        values = {key: _with_lists(value) for key, value in tree.items()}
        if values and all(type(key) is int for key in values):
            return [values[key] for key in sorted(values)]
        return values
    return {key: _with_lists(value) for key, value in tree.items()} if type(tree) is dict else tree
