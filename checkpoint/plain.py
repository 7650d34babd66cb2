"""`require_plain`: checks that a checkpoint contains only tensors and plain values.

The accepted types are those that torch.load(weights_only=True) reads in a script that has added no safe globals.
"""

from __future__ import annotations

import pickle
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn, TypeVar, overload

import torch
from torch import Tensor, nn

from ..errors import CheckpointError
from ..protocols import StateDict, Tree
from .to_plain import MAX_INT_BITS, to_plain

__all__ = [
    "TRUSTED_KEY",
    "Trusted",
    "Unopened",
    "Untrusted",
    "WithObjects",
    "has_unopened",
    "replace_marked",
    "require_plain",
    "tensors",
    "to_plain",
    "untrust",
]

TRUSTED_KEY = "__loopwright_trusted__"
_SIMPLE = frozenset((type(None), bool, float, complex, str, bytearray, torch.Size, torch.dtype, torch.device))
_TENSORS = frozenset((Tensor, nn.Parameter))
_DICTS = frozenset((dict, OrderedDict, Counter))
_SEQUENCES = frozenset((list, tuple, set))

_MAX_NAMED = 30
_DEEPEST = 200  # functions that visit a checkpoint recurse

MarkT = TypeVar("MarkT")
_Reduced = tuple[type[OrderedDict[str, bytes]], tuple[()], None, None, Iterator[tuple[str, bytes]]]
_Path = tuple[Any, Any] | None  # (path of the parent, key): a linked list, since most paths are never shown


class _Attribute(str):
    """A step of a path that is an attribute, not a key."""

    __slots__ = ()


def require_plain(value: Tree, where: str = "checkpoint") -> None:
    """Check that torch.load(weights_only=True) accepts every entry of a checkpoint.

    Accepted, by exact type: None, bool, int, float, complex, str, bytes (not empty), bytearray, Tensor, Parameter,
    torch.Size, torch.dtype, torch.device, and dict, OrderedDict, Counter, list, tuple, set of these; and `Trusted`.
    Subclasses (np.float64, an IntEnum, a defaultdict, a namedtuple) are rejected, because pickle stores their class.

    Args:
        value: The checkpoint, or a part of it.
        where: Prefix of the paths in the message.

    Raises:
        CheckpointError: Some entries are not plain; the message lists the path and the type of each.
    """
    if type(value) is WithObjects:
        return
    problems = [f"{_show(where, path)}: {what}" for path, what in _walk(value) if isinstance(what, str)]
    if not problems:
        return
    shown = problems[:_MAX_NAMED]
    if len(problems) > len(shown):
        shown.append(f"and {len(problems) - len(shown)} more")
    entries = (
        "1 entry that is not a tensor or a plain value"
        if len(problems) == 1
        else (f"{len(problems)} entries that are not tensors or plain values")
    )
    raise CheckpointError(
        f"the {where} has {entries}, so it could not be opened with torch.load(weights_only=True):\n    "
        + "\n    ".join(shown),
        fix="convert them (float(x), x.item(), list(x), dict(x), torch.from_numpy(x)), or wrap an object that you "
        "trust in loopwright.Trusted(...): only a load with weights_only=False returns it.",
    )


def tensors(value: Tree, where: str = "checkpoint") -> Iterator[tuple[str, Tensor]]:
    """Yield the path and the tensor of every tensor in a checkpoint, for messages and sizes."""
    for path, found in _walk(value):
        if isinstance(found, Tensor):
            yield _show(where, path), found


def _walk(value: Tree) -> Iterator[tuple[_Path, str | Tensor]]:
    """Yield tensors, and what is wrong with an entry as text; breadth first, so that nothing recurses."""
    queue: list[tuple[Tree, _Path]] = [(dict(value) if type(value) is WithObjects else value, None)]
    seen: set[int] = set()
    for item, path in queue:  # grows while it is read
        kind = type(item)
        if kind in _SIMPLE or kind in _MARKED:
            continue
        if kind in _TENSORS:
            assert isinstance(item, Tensor)
            yield path, item
            if item.__dict__:  # torch saves the attributes that a user set on a tensor
                queue.extend((attribute, (path, _Attribute(name))) for name, attribute in item.__dict__.items())
        elif type(item) is int:
            if item.bit_length() > MAX_INT_BITS:
                yield path, f"int of {item.bit_length()} bits; at most {MAX_INT_BITS} can be read back"
        elif kind is bytes:
            if not item:
                yield path, "empty bytes, which torch's safe reader refuses (use None or bytearray())"
        elif kind in _DICTS:
            if id(item) in seen:
                continue
            seen.add(id(item))
            assert isinstance(item, dict)
            for key, entry in item.items():
                if type(key) is not str:
                    queue.append((key, (path, key)))
                if type(entry) not in _SIMPLE:
                    queue.append((entry, (path, key)))
            if kind is OrderedDict and item.__dict__:  # state_dict()._metadata
                queue.extend((attribute, (path, _Attribute(name))) for name, attribute in item.__dict__.items())
        elif kind in _SEQUENCES:
            if id(item) not in seen:
                seen.add(id(item))
                assert isinstance(item, Iterable)
                queue.extend((entry, (path, index)) for index, entry in enumerate(item) if type(entry) not in _SIMPLE)
        else:
            yield path, _describe(item)


def _describe(item: object) -> str:
    if isinstance(item, Unopened):
        return f"an object of {item.kind} that was not opened"
    kind = type(item)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    base = next((b for b in kind.__mro__[1:] if b in _SIMPLE | _TENSORS | _DICTS | _SEQUENCES | {int, bytes}), None)
    return name if base is None else f"{name} (a subclass of {base.__name__})"


def _show(where: str, path: _Path) -> str:
    steps: list[str] = []
    while path is not None:
        path, key = path
        steps.append(f".{key}" if isinstance(key, _Attribute) else f"[{key!r}]")
    return where + "".join(reversed(steps))


class Trusted:
    """Mark an object of any picklable type as trusted, so that a checkpoint can contain it.

    It is pickled immediately, so that later changes of the object are not saved. Loading restores the object with
    weights_only=False, and returns an `Untrusted` marker otherwise.

    Args:
        value: The object; pickle must be able to write it.

    Raises:
        CheckpointError: The object cannot be pickled.
    """

    def __init__(self, value: Tree) -> None:
        self.value = value
        try:
            self._pickled = pickle.dumps(value)
        except (pickle.PicklingError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(
                f"Trusted({_type_name(value)}) cannot be put into a checkpoint: it cannot be pickled ({error}).",
                fix="pass an object that pickle can write: its class and functions at the top level of a module.",
            ) from error

    def __reduce__(self) -> _Reduced:
        # torch.load(weights_only=True) accepts an OrderedDict; so the checkpoint need not be copied to replace this.
        return _stored(self._pickled)

    def __repr__(self) -> str:
        return f"Trusted({self.value!r})"


class Untrusted:
    """A placeholder for a `Trusted` object of a file that was opened with weights_only=True. Any use raises an error.

    It can be saved again, because it keeps the bytes.
    """

    def __init__(self, pickled: bytes, where: str) -> None:
        self._pickled = pickled
        self._where = where

    def __reduce__(self) -> _Reduced:
        return _stored(self._pickled)

    def __repr__(self) -> str:
        return f"<Untrusted {self._where}: {len(self._pickled)} bytes, not opened>"

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # copy, pickle and inspect ask for these and expect this error
            raise AttributeError(name)
        self._refuse()

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        """Raise a CheckpointError that explains how to open the object."""
        self._refuse()

    def __getitem__(self, key: object) -> NoReturn:
        self._refuse()

    def __iter__(self) -> NoReturn:
        self._refuse()

    def __len__(self) -> int:
        self._refuse()

    def __bool__(self) -> bool:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise CheckpointError(
            f"{self._where} is an object that was saved as Trusted(...), and the checkpoint was opened with "
            "weights_only=True, so it was not unpickled.",
            fix="pass weights_only=False, only if you trust whoever wrote the file: unpickling can run any code.",
        )


class Unopened(Untrusted):
    """A placeholder for an object that a file opened with weights_only=True holds as pickle wrote it; not savable.

    Args:
        kind: Name of its class, or of the function that makes it.
        where: Its path in the checkpoint.
    """

    def __init__(self, kind: str, where: str) -> None:
        super().__init__(b"", where)
        self.kind = kind

    def __reduce__(self) -> NoReturn:
        self._refuse()

    def __repr__(self) -> str:
        return f"<Unopened {self._where}: {self.kind}>"

    def _refuse(self) -> NoReturn:
        raise CheckpointError(
            f"{self._where} is an object of {self.kind}, and the checkpoint was opened with weights_only=True.",
            fix="pass weights_only=False, only if you trust whoever wrote the file: unpickling can run any code.",
        )


def has_unopened(value: Tree) -> bool:
    """Return whether a loaded checkpoint has an `Unopened` object."""
    if isinstance(value, dict | list | tuple):
        return any(has_unopened(item) for item in (value.values() if isinstance(value, dict) else value))
    return isinstance(value, Unopened)


class WithObjects(dict[str, Any]):  # Any: what pickle can write
    """A checkpoint that may hold any object: programs for other trainers pickle them, and read them with pickle.

    It is written as a dict. Opened with weights_only=True, its objects are `Unopened`.
    """


@overload
def untrust(value: StateDict, allow: bool, where: str = ...) -> StateDict: ...
@overload
def untrust(value: Tree, allow: bool, where: str = ...) -> Tree: ...
def untrust(value: Tree, allow: bool, where: str = "checkpoint") -> Tree:
    """Return a loaded checkpoint with `Trusted` objects restored; its dicts and lists are changed in place.

    Args:
        value: The result of torch.load.
        allow: True unpickles the objects, which can run any code; False replaces them with `Untrusted` markers.
        where: Prefix of the paths in messages.

    Raises:
        CheckpointError: An object cannot be unpickled, for example because its class does not exist.
    """

    def unpickle(pickled: bytes, path: str) -> object:
        return _unpickle(pickled, path) if allow else Untrusted(pickled, path)

    return replace_marked(value, TRUSTED_KEY, bytes, unpickle, where)


def replace_marked(
    value: Tree,
    key: str,
    kind: type[MarkT],
    make: Callable[[MarkT, str], object],
    where: str = "checkpoint",
    seen: set[int] | None = None,
    depth: int = 0,
) -> object:
    """Replace each dict whose only entry is `key`; dicts and lists are changed in place, tuples are new.

    Args:
        value: A loaded checkpoint.
        key: The key of a mark.
        kind: Type of the value of a mark; a dict with a value of another type is not changed.
        make: Called with the value and the path of a mark; returns its replacement.
        where: Prefix of the paths.
        seen: Containers that were already visited, by id.
        depth: In how many containers the value is.

    Raises:
        CheckpointError: Containers are nested deeper than 200 levels.
    """
    if depth > _DEEPEST:
        raise CheckpointError(
            f"Expected containers in the checkpoint that nest up to {_DEEPEST} levels, got more: {where[:80]}...",
            fix="use another checkpoint, or save the entry as a tensor or as text.",
        )
    seen = set() if seen is None else seen
    if isinstance(value, dict):
        if len(value) == 1 and isinstance(marked := value.get(key), kind):
            return make(marked, where)
        entries: Iterable[tuple[Any, Any]] = value.items()  # Any: keys of a dict or positions of a list, and values
    elif isinstance(value, list | tuple) and not isinstance(value, torch.Size):
        entries = enumerate(value)
    else:
        return value
    if id(value) in seen:
        return value
    seen.add(id(value))
    changed = {}
    for step, item in entries:
        if isinstance(item, dict | list | tuple):
            new = replace_marked(item, key, kind, make, f"{where}[{step!r}]", seen, depth + 1)
            if new is not item:
                changed[step] = new
    if not changed:
        return value
    if isinstance(value, tuple):
        return tuple(changed.get(index, item) for index, item in enumerate(value))
    for step, item in changed.items():
        value[step] = item
    return value


def _unpickle(pickled: bytes, where: str) -> object:  # whatever the user had trusted
    try:
        return pickle.loads(pickled)
    except Exception as error:  # unpickling runs the constructors of the user's classes: any error is possible
        raise CheckpointError(
            f"{where} was saved as Trusted(...) and cannot be unpickled: {type(error).__name__}: {error}",
            fix="make its class importable under its old name, or open the file with weights_only=True.",
        ) from error


def _stored(pickled: bytes) -> _Reduced:
    return OrderedDict, (), None, None, iter([(TRUSTED_KEY, pickled)])


def _type_name(value: object) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


_MARKED = frozenset((Trusted, Untrusted))
