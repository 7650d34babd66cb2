"""Taking sharded tensors out of a checkpoint and restoring them: paths and placeholders.

A path names a place in the nested checkpoint: the steps, joined by "/". A step of digits is an int (a key, or a
position in a list); every other step is a string, in which "%", "/" and lone surrogates are percent-encoded. A string
that reads as an int has its first character encoded; a key of another type is "%!" and its repr.
"""

from __future__ import annotations

import re
import sys
from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, overload

from ...protocols import StateDict, Tree
from ...strategies.distributed.shards import RemoteShards
from ..plain import replace_marked

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

PLACEHOLDER_KEY = "__loopwright_tensor__"

_RESERVED = re.compile(r"-?[0-9]+|__metadata__")  # the latter is a name that safetensors keeps for itself
_ENCODED = re.compile("[%/\ud800-\udfff]")
_DICTS = (dict, OrderedDict, Counter)


@dataclass(slots=True)
class Split:
    """A checkpoint in two parts.

    Attributes:
        rest: The checkpoint with a placeholder for each sharded tensor; its containers are copies, its tensors are not.
        tensors: The sharded tensors by path.
        remote: Those of other ranks alone, by path.
        clashes: Paths of dicts of the user that look like placeholders, so that the checkpoint cannot be saved.
    """

    rest: StateDict = field(default_factory=dict)
    tensors: dict[str, DTensor] = field(default_factory=dict)
    remote: dict[str, RemoteShards] = field(default_factory=dict)
    clashes: list[str] = field(default_factory=list)


def holds_sharded(tree: Tree) -> bool:
    """Return whether a DTensor is among the values. Without torch.distributed.tensor imported, there can be none."""
    kind = _sharded_type()
    if kind is None:
        return False
    queue = [tree]
    seen: set[int] = set()
    for item in queue:  # grows while it is read
        if isinstance(item, kind):
            return True
        if isinstance(item, dict | list | tuple) and id(item) not in seen:
            seen.add(id(item))
            queue.extend(item.values() if isinstance(item, dict) else item)
    return False


def take_out(checkpoint: StateDict) -> Split:
    """Return the checkpoint without its sharded tensors, and these by path; the checkpoint is not changed."""
    split = Split()
    rest = _copy(checkpoint, "", _sharded_type(), split, {})
    assert isinstance(rest, dict)
    split.rest = rest
    return split


@overload
def put_back(tree: StateDict, tensors: Mapping[str, object], used: set[str], unknown: list[str]) -> StateDict: ...
@overload
def put_back(tree: Tree, tensors: Mapping[str, object], used: set[str], unknown: list[str]) -> Tree: ...
def put_back(tree: Tree, tensors: Mapping[str, object], used: set[str], unknown: list[str]) -> Tree:
    """Replace placeholders by what `tensors` has for them, in place; return the tree, new where it is a tuple.

    Args:
        tree: Content of the state file.
        tensors: By path.
        used: Receives the paths that were found.
        unknown: Receives the paths that `tensors` lacks.
    """

    def find(path: str, _: str) -> object:
        if path not in tensors:
            unknown.append(path)
            return {PLACEHOLDER_KEY: path}
        used.add(path)
        return tensors[path]

    return replace_marked(tree, PLACEHOLDER_KEY, str, find)


def step_of(key: object) -> str:
    """Return a key of a dict, or a position in a list, as a step of a path."""
    if type(key) is int:
        return str(key)
    text = key if type(key) is str else f"!{key!r}"
    encoded = _ENCODED.sub(lambda found: _percent(found[0]), text)
    if type(key) is not str:
        return "%" + encoded  # no encoded text begins like this
    return _percent(encoded[0]) + encoded[1:] if _RESERVED.fullmatch(encoded) else encoded


def _percent(character: str) -> str:
    return "".join(f"%{byte:02X}" for byte in character.encode("utf-8", "surrogatepass"))


def _sharded_type() -> type[DTensor] | None:
    kind: type[DTensor] | None = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return kind


def _copy(value: Tree, path: str, kind: type[DTensor] | None, split: Split, copies: dict[int, Tree]) -> Tree:
    if kind is not None and isinstance(value, kind):
        split.tensors[path] = value
        return {PLACEHOLDER_KEY: path}
    if isinstance(value, RemoteShards):
        split.remote[path] = value
        return {PLACEHOLDER_KEY: path}
    if id(value) in copies:
        return copies[id(value)]
    new: Tree
    if type(value) in _DICTS:
        assert isinstance(value, dict)
        if len(value) == 1 and PLACEHOLDER_KEY in value:
            split.clashes.append(path)
        entries = copies[id(value)] = type(value)()
        for key, item in value.items():
            entries[key] = _copy(item, _join(path, key), kind, split, copies)
        if type(value) is not dict:  # state_dict()._metadata
            entries.__dict__.update(value.__dict__)
        return entries
    if type(value) is list:
        items: list[Tree] = []
        copies[id(value)] = items
        items.extend(_copy(item, _join(path, index), kind, split, copies) for index, item in enumerate(value))
        return items
    if type(value) is tuple:
        new = tuple(_copy(item, _join(path, index), kind, split, copies) for index, item in enumerate(value))
        copies[id(value)] = new
        return new
    return value


def _join(path: str, key: object) -> str:
    return f"{path}/{step_of(key)}" if path else step_of(key)
