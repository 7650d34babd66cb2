"""Casting the floating point tensors of a batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["cast_floats"]


def cast_floats(data: Any, dtype: torch.dtype) -> Any:  # Any: a batch of any structure
    """Return the data with each real floating point tensor cast to `dtype`.

    Mappings, lists, tuples, named tuples and dataclass instances are walked and keep their type; a container in
    which nothing changes is returned as it is. Integers, complex tensors and everything else stay.
    """
    if isinstance(data, Tensor):
        return data.to(dtype) if data.is_floating_point() else data
    if isinstance(data, Mapping):
        return _cast_mapping(data, dtype)
    if isinstance(data, (list, tuple)):
        items = [cast_floats(item, dtype) for item in data]
        if all(new is old for new, old in zip(items, data, strict=True)):
            return data
        return type(data)(*items) if hasattr(data, "_fields") else type(data)(items)
    if dataclasses.is_dataclass(data) and not isinstance(data, type):
        return _cast_dataclass(data, dtype)
    return data


def _cast_mapping(data: Mapping[Any, Any], dtype: torch.dtype) -> Any:
    changed = {key: new for key, value in data.items() if (new := cast_floats(value, dtype)) is not value}
    if not changed:
        return data
    try:
        # A copy keeps what the class has beside its items (a defaultdict's factory).
        result = data.copy()  # type: ignore[attr-defined]
        result.update(changed)
    except (AttributeError, TypeError):  # a read-only mapping
        return {**data, **changed}
    return result


def _cast_dataclass(data: Any, dtype: torch.dtype) -> Any:
    import copy

    changed = {}
    for field in dataclasses.fields(data):
        old = getattr(data, field.name)
        new = cast_floats(old, dtype)
        if new is not old:
            changed[field.name] = new
    if not changed:
        return data
    result = copy.copy(data)
    for name, value in changed.items():
        object.__setattr__(result, name, value)  # also for frozen ones; __post_init__ has already run
    return result
