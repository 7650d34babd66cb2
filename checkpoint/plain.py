"""What a checkpoint may hold: `require_plain` refuses the rest by name. storage.save calls it for every checkpoint.

The accepted types are those that torch.load(weights_only=True) reads in a script that has added no safe globals.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import CheckpointError
from .convert_plain import MAX_INT_BITS, to_plain
from .trusted import TRUSTED_KEY, Trusted, Untrusted, untrust

__all__ = ["TRUSTED_KEY", "Trusted", "Untrusted", "require_plain", "tensors", "to_plain", "untrust"]

_SIMPLE = frozenset((type(None), bool, float, complex, str, bytearray, torch.Size, torch.dtype, torch.device))
_TENSORS = frozenset((Tensor, nn.Parameter))
_DICTS = frozenset((dict, OrderedDict, Counter))
_SEQUENCES = frozenset((list, tuple, set))
_MARKED = frozenset((Trusted, Untrusted))

_MAX_NAMED = 30

_Path = tuple[Any, Any] | None  # (path of the parent, key): a linked list, since most paths are never shown


class _Attribute(str):
    """A step of a path that is an attribute, not a key."""

    __slots__ = ()


def require_plain(value: Any, where: str = "checkpoint") -> None:  # Any: whatever a user's hook put there
    """Raise an error that names every entry that torch.load(weights_only=True) would refuse.

    Accepted, by exact type: None, bool, int, float, complex, str, bytes (not empty), bytearray, Tensor, Parameter,
    torch.Size, torch.dtype, torch.device, and dict, OrderedDict, Counter, list, tuple, set of these; and `Trusted`.
    Subclasses (np.float64, an IntEnum, a defaultdict, a namedtuple) are refused: pickle writes their class by name.

    Args:
        value: The checkpoint, or a part of it.
        where: What the paths in the message begin with.

    Raises:
        CheckpointError: Some entries are not plain; the message has the path and the type of each.
    """
    problems = [f"{_show(where, path)}: {what}" for path, what in _walk(value) if isinstance(what, str)]
    if not problems:
        return
    shown = problems[:_MAX_NAMED]
    if len(problems) > len(shown):
        shown.append(f"and {len(problems) - len(shown)} more")
    entries = (
        "1 entry that is no tensor or plain value"
        if len(problems) == 1
        else (f"{len(problems)} entries that are no tensors or plain values")
    )
    raise CheckpointError(
        f"the {where} has {entries}, so it could not be opened with torch.load(weights_only=True):\n    "
        + "\n    ".join(shown),
        fix="convert them (float(x), x.item(), list(x), dict(x), torch.from_numpy(x)), or wrap an object that you "
        "trust in loopwright.Trusted(...), which is given back only to those who load with weights_only=False.",
    )


def tensors(value: Any, where: str = "checkpoint") -> Iterator[tuple[str, Tensor]]:  # Any: a nested checkpoint
    """Yield the path and the tensor of every tensor in a checkpoint, for messages and sizes."""
    for path, found in _walk(value):
        if isinstance(found, Tensor):
            yield _show(where, path), found


def _walk(value: Any) -> Iterator[tuple[_Path, str | Tensor]]:  # Any: a nested checkpoint
    """Yield tensors, and what is wrong with an entry as text; breadth first, so that nothing recurses."""
    queue: list[tuple[Any, _Path]] = [(value, None)]
    seen: set[int] = set()
    for item, path in queue:  # grows while it is read
        kind = type(item)
        if kind in _SIMPLE or kind in _MARKED:
            continue
        if kind in _TENSORS:
            yield path, item
            if item.__dict__:  # torch saves the attributes that a user set on a tensor
                queue.extend((attribute, (path, _Attribute(name))) for name, attribute in item.__dict__.items())
        elif kind is int:
            if item.bit_length() > MAX_INT_BITS:
                yield path, f"int of {item.bit_length()} bits; at most {MAX_INT_BITS} can be read back"
        elif kind is bytes:
            if not item:
                yield path, "empty bytes, which torch's safe reader refuses (use None or bytearray())"
        elif kind in _DICTS:
            if id(item) in seen:
                continue
            seen.add(id(item))
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
                queue.extend((entry, (path, index)) for index, entry in enumerate(item) if type(entry) not in _SIMPLE)
        else:
            yield path, _describe(item)


def _describe(item: object) -> str:
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
