"""The tensors in the records of a checkpoint file, for messages about damage.

The file's pickle is read by an unpickler that imports no classes and calls no functions. Each object in the pickle
becomes an inert object that stores its arguments.
"""

from __future__ import annotations

import io
import pickle
import zlib
from collections import OrderedDict
from typing import IO, Any, NamedTuple, NoReturn

from .archive import DESCRIPTOR_SIGNATURE, LOCAL, LOCAL_SIGNATURE

__all__ = ["Storage", "read_storages", "read_storages_from_front"]

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
        size_bytes: Its size.
    """

    path: str
    size_bytes: int


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


def read_storages(data: bytes, where: str = "checkpoint") -> dict[str, Storage]:
    """Return the storages of a checkpoint by the key of their record (`data/<key>`); {} if the pickle is not readable.

    Args:
        data: Content of the record data.pkl.
        where: What the paths begin with.
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
