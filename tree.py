"""`map_tree`: a function applied within nested containers, for batches and what steps return; on the hot path."""

from __future__ import annotations

import copy
import dataclasses
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping
from typing import Any

from .protocols import Tree

# Any in this file: data of the user's, and parts of it.


def map_tree(data: Any, is_leaf: Callable[[Any], bool], function: Callable[[Any], Any]) -> Any:
    """Return the data with a function applied to each leaf.

    Goes through lists, tuples, named tuples, mappings and dataclasses, which keep their type and what they hold beside
    their items. A container in which nothing changes is returned as it is.

    Args:
        data: Any nesting of containers.
        is_leaf: Whether the function is applied to a value, which may be a container.
        function: Called with a leaf.
    """
    if is_leaf(data):
        return function(data)
    if isinstance(data, (list, tuple)):
        items = [map_tree(item, is_leaf, function) for item in data]
        if all(new is old for new, old in zip(items, data, strict=True)):
            return data
        return type(data)(*items) if hasattr(data, "_fields") else type(data)(items)
    if isinstance(data, Mapping):
        pairs = {key: map_tree(value, is_leaf, function) for key, value in data.items()}
        if all(pairs[key] is value for key, value in data.items()):
            return data
        return _rebuild_mapping(data, pairs)
    if dataclasses.is_dataclass(data) and not isinstance(data, type):
        return _map_dataclass(data, is_leaf, function)
    return data


def _rebuild_mapping(data: Mapping[Hashable, Tree], pairs: dict[Hashable, Tree]) -> Tree:
    if type(data) is dict:
        return pairs
    if isinstance(data, defaultdict):
        return defaultdict(data.default_factory, pairs)
    if hasattr(data, "__setitem__"):
        changed: Any = copy.copy(data)  # keeps what a subclass holds besides its items
        for key, value in pairs.items():
            changed[key] = value
        return changed
    return type(data)(pairs)  # type: ignore[call-arg]  # every mapping of the standard library takes a dict


def _map_dataclass(data: Any, is_leaf: Callable[[Any], bool], function: Callable[[Any], Tree]) -> Tree:
    changes = {}
    for field in dataclasses.fields(data):
        old = getattr(data, field.name, None)
        new = map_tree(old, is_leaf, function)
        if new is not old:
            changes[field.name] = new
    if not changes:
        return data
    changed = copy.copy(data)
    for name, value in changes.items():
        object.__setattr__(changed, name, value)  # also works for a frozen one; __post_init__ must not run again
    return changed
