"""The tensors in the records of a checkpoint file, for messages about damage; and what reading them would allocate.

The file's pickle is read by an unpickler that imports no classes and calls no functions. Each object in the pickle
becomes an inert object that stores its arguments.
"""

from __future__ import annotations

import io
import math
import pickle
import zlib
from collections import OrderedDict
from typing import IO, Any, NamedTuple, NoReturn

from .archive import DESCRIPTOR_SIGNATURE, LOCAL, LOCAL_SIGNATURE, Damaged, read_directory

_ITEM_BYTES = {
    "DoubleStorage": 8,
    "LongStorage": 8,
    "ComplexDoubleStorage": 16,
    "ComplexFloatStorage": 8,
    "FloatStorage": 4,
    "IntStorage": 4,
    "QInt32Storage": 4,
    "HalfStorage": 2,
    "BFloat16Storage": 2,
    "ShortStorage": 2,
}
_LONGEST_PICKLE = 1 << 26


class Storage(NamedTuple):
    """The memory of one or more tensors.

    Attributes:
        path: Where the first tensor is that uses it: `checkpoint['state_dict']['layer.weight']`.
        size_bytes: Size in bytes.
    """

    path: str
    size_bytes: int


class TooMuch(Exception):
    """A file requests more memory than it has bytes, as a clause for an error message."""


class _Inert:
    """Stand for an object, or with `name` for a class, of the pickle; accept everything and do nothing."""

    name = ""

    def __new__(cls, *args: object, **kwargs: object) -> _Inert:
        self = object.__new__(_Inert)
        self.parts = list(args)
        return self

    def __init__(self, *args: object, **kwargs: object) -> None: ...

    parts: list[object]

    def __setstate__(self, state: object) -> None:
        self.parts.append(state)

    def __setitem__(self, key: object, value: object) -> None:
        self.parts.append(value)

    def append(self, value: object) -> None:
        self.parts.append(value)

    def extend(self, values: list[object]) -> None:
        self.parts.extend(values)

    add = append


class _Reference(NamedTuple):
    key: str
    size_bytes: int
    num_items: int = 0


# pickle's Python version: its memo is a dict, so that no number in the file makes it allocate memory.
class _InertUnpickler(pickle._Unpickler):
    def find_class(self, module: str, name: str) -> Any:  # Any: as in pickle
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        return type("_InertClass", (_Inert,), {"name": name})

    def persistent_load(self, pid: Any) -> object:  # Any: as in pickle
        _, kind, key, _, count = pid
        return _Reference(str(key), int(count) * _ITEM_BYTES.get(kind.name, 1))

    def get_extension(self, code: int) -> NoReturn:
        raise pickle.UnpicklingError(f"extension code {code}")


class _Counted(_Inert):
    """Stand for a class that allocates as many items as it is called with; torch.save never writes such a call."""

    def __new__(cls, *args: object, **kwargs: object) -> _Inert:  # type: ignore[misc]  # as in _Inert
        if any(isinstance(one, int) for one in args):
            raise TooMuch(f"it has {cls.name} allocate {args[0]!r} items")
        return super().__new__(cls, *args, **kwargs)


class _View(_Inert):
    """Stand for a function that makes a tensor of a part of a storage; torch enlarges a storage that is too small."""

    def __new__(cls, *args: object, **kwargs: object) -> _Inert:  # type: ignore[misc]  # as in _Inert
        match args:
            case [_Reference() as storage, int() as offset, tuple() as size, tuple() as stride, *_] if 0 not in size:
                end = offset + 1
                for length, step in zip(size, stride, strict=False):
                    end += (length - 1) * step
                if end > storage.num_items or (cls.name == "_rebuild_qtensor" and math.prod(size) > storage.num_items):
                    raise TooMuch(f"it has a tensor of shape {size} in a storage of {storage.num_items} items")
        return super().__new__(cls, *args, **kwargs)


class _BoundedUnpickler(_InertUnpickler):
    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file)
        self.sizes: dict[str, int] = {}

    def find_class(self, module: str, name: str) -> Any:  # Any: as in pickle
        if name == "bytearray" or name.endswith(("Tensor", "Storage")):
            return type("_CountedClass", (_Counted,), {"name": name})
        if name in ("_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_qtensor"):
            return type("_ViewClass", (_View,), {"name": name})
        return super().find_class(module, name)

    def persistent_load(self, pid: Any) -> object:  # Any: as in pickle
        key, count = str(pid[2]), int(pid[4])
        self.sizes[key] = count * _ITEM_BYTES.get(getattr(pid[1], "name", ""), 1)
        return _Reference(key, self.sizes[key], count)


def require_bounded(file: IO[bytes]) -> None:
    """Check that reading a file of torch.save allocates no more than what is in it. What is damaged is left to others.

    The position in the file stays. A file that cannot be read twice is not checked.

    Raises:
        TooMuch: It would; or its pickle, which becomes some 50 times as much memory, is longer than 64 MiB.
    """
    if file.seekable():
        start = file.tell()
        _require_bounded(file)
        file.seek(start)


def _require_bounded(file: IO[bytes]) -> None:
    size = file.seek(0, io.SEEK_END)
    file.seek(0)
    pickles: IO[bytes] = file
    count = 4  # torch's format before 1.6: a number, a version, the system, and the content
    if file.read(4) == LOCAL_SIGNATURE:
        try:
            record = next(one for one in read_directory(file, size).records if one.name == "data.pkl")
        except (Damaged, StopIteration):
            return
        if record.size > _LONGEST_PICKLE:
            raise TooMuch(f"its plain values take {record.size:,} bytes; at most {_LONGEST_PICKLE:,} are read")
        file.seek(record.header)
        header = file.read(LOCAL.size)
        if len(header) < LOCAL.size:
            return
        fields = LOCAL.unpack(header)
        file.seek(fields[-2] + fields[-1], io.SEEK_CUR)
        pickles, count = io.BytesIO(file.read(record.size)), 1
    else:
        file.seek(0)
    sizes: dict[str, int] = {}
    for _ in range(count):
        reader = _BoundedUnpickler(pickles)
        try:
            reader.load()
        except TooMuch:
            raise
        except Exception:  # any bytes may stand here, and pickle documents no closed set of errors; torch names it
            return
        sizes.update(reader.sizes)
    if sum(sizes.values()) > size:
        raise TooMuch(f"its tensors would take {sum(sizes.values()):,} bytes, and it has {size:,}")


def read_storages(data: bytes, where: str = "checkpoint") -> dict[str, Storage]:
    """Return the storages of a checkpoint by the key of their record (`data/<key>`); {} if the pickle is not readable.

    Args:
        data: Content of the record data.pkl.
        where: Prefix of the paths.
    """
    try:
        root = _InertUnpickler(io.BytesIO(data)).load()
    except Exception:  # any bytes may stand here, and pickle documents no closed set of errors; names are a courtesy
        return {}
    storages: dict[str, Storage] = {}
    stack: list[tuple[object, str]] = [(root, where)]
    seen: set[int] = set()
    while stack:
        value, path = stack.pop()
        if isinstance(value, _Reference):
            storages.setdefault(value.key, Storage(path, value.size_bytes))
            continue
        if not isinstance(value, dict | list | tuple | _Inert) or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, _Inert):
            below = [(part, path) for part in value.parts]
        elif isinstance(value, dict):
            below = [(item, f"{path}[{key!r}]") for key, item in dict.items(value)]
        else:
            below = [(item, f"{path}[{index}]") for index, item in enumerate(value)]
        stack.extend(reversed(below))
    return storages


def read_storages_from_front(file: IO[bytes], size: int) -> dict[str, Storage]:
    """Return the storages of a truncated file, read from its first record; {} if that is not complete.

    Args:
        file: File as torch.save writes it: data.pkl comes first.
        size: Size of the file in bytes.
    """
    file.seek(0)
    raw = file.read(min(size, _LONGEST_PICKLE))
    if len(raw) < LOCAL.size or raw[:4] != LOCAL_SIGNATURE:
        return {}
    fields = LOCAL.unpack_from(raw)
    start = LOCAL.size + fields[-2] + fields[-1]
    end = start
    while (end := raw.find(DESCRIPTOR_SIGNATURE, end)) >= 0:
        crc, size = (int.from_bytes(raw[end + at : end + at + 4], "little") for at in (4, 8))
        if size == end - start and crc == zlib.crc32(raw[start:end]):
            return read_storages(raw[start:end])
        end += 1
    return {}
