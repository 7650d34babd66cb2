"""Traversal of structures of tensors: lists, tuples, mappings and dataclasses."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from ..protocols import Tree

# Any in this file: data of any structure.


def leaves(data: Tree, path: str = "") -> list[tuple[str, Any]]:
    """Return path and value of each leaf, which is everything that is not a container, in a fixed order."""
    found = []
    if isinstance(data, Mapping):
        for key, value in data.items():
            found += leaves(value, f"{path}[{key!r}]")
    elif isinstance(data, list | tuple):
        for index, value in enumerate(data):
            found += leaves(value, f"{path}[{index}]")
    elif dataclasses.is_dataclass(data) and not isinstance(data, type):
        for field in dataclasses.fields(data):
            found += leaves(getattr(data, field.name), f"{path}.{field.name}")
    else:
        found.append((path, data))
    return found


def map_leaves(data: Tree, function: Callable[[Any], object]) -> Any:
    """Return the structure with `function` applied to everything that is not a container, in the order of `leaves`.

    Containers keep their type and what they hold beside their items.
    """
    if isinstance(data, Mapping):
        items = {key: map_leaves(value, function) for key, value in data.items()}
        if type(data) is dict:
            return items
        try:
            changed: Any = copy.copy(data)
            for key, value in items.items():  # outputs of transformers refuse `update`
                changed[key] = value
        except (AttributeError, TypeError):  # a read-only mapping
            return items
        return changed
    if isinstance(data, list | tuple):
        values = [map_leaves(value, function) for value in data]
        return type(data)(*values) if hasattr(data, "_fields") else type(data)(values)
    if dataclasses.is_dataclass(data) and not isinstance(data, type):
        instance = copy.copy(data)
        for field in dataclasses.fields(data):
            # Also for frozen ones; __post_init__ has already run.
            object.__setattr__(instance, field.name, map_leaves(getattr(data, field.name), function))
        return instance
    return function(data)
