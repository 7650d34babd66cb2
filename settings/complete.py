"""Complete settings with the defaults of their classes, as printed and saved."""

from __future__ import annotations

import dataclasses
import enum
import inspect
import typing
from collections.abc import Callable
from datetime import date, time
from importlib import import_module
from pathlib import PurePath
from typing import Any

from ..lazy import origin
from .parameters import EMPTY, Parameter, parameters_of
from .tree import Settings
from .typed import ObjectPlan, Typed

# Any in this file: values of settings.


def is_plain(value: object) -> bool:
    """Return whether a value can be written as YAML."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and is_plain(one) for key, one in value.items())
    if isinstance(value, list | tuple):
        return all(is_plain(one) for one in value)
    return value is None or isinstance(value, str | int | float | bool)


def complete(value: Any, raw: Any, *, names_class: bool = False, with_defaults: bool = True) -> object:
    """Return the form of a value in the saved settings.

    Args:
        value: What is made of the settings: plans, and values that have their types.
        raw: The settings.
        names_class: Whether a plan is written with its class though the settings did not name it.
        with_defaults: Whether defaults are added, and classes written by their whole paths.
    """
    if isinstance(value, ObjectPlan):
        if isinstance(raw, str) and not with_defaults:
            return raw
        is_node = isinstance(raw, dict) and "class_path" in raw
        given = raw["init_args"] if is_node else raw if isinstance(raw, dict) else {}
        known = parameters_of(value.target).named
        arguments = {}
        for name in dict.fromkeys([*known, *value.arguments]) if with_defaults else given:
            if name in value.arguments:
                arguments[name] = complete(value.arguments[name], given.get(name), with_defaults=with_defaults)
            elif with_defaults:
                default = written_default(known[name])
                if default is not EMPTY:
                    arguments[name] = default
        if not (names_class or is_node or isinstance(raw, str)):
            return arguments
        path = public_path(value.target) if with_defaults else raw["class_path"]
        return {
            "class_path": path,
            "init_args": arguments,
            **({"partial": True} if is_node and raw.get("partial") else {}),
        }
    if isinstance(value, list | tuple) and isinstance(raw, list):
        start = len(value) - len(raw)  # entries of the default precede added ones
        return [
            complete(one, raw[place - start] if place >= start else None, with_defaults=with_defaults)
            for place, one in enumerate(value)
        ]
    if isinstance(value, dict) and isinstance(raw, dict) and list(value) == list(raw):
        return {key: complete(one, raw[key], with_defaults=with_defaults) for key, one in value.items()}
    if isinstance(value, str | int | float | bool) and not isinstance(value, enum.Enum):
        return value
    if isinstance(value, PurePath | date | time):
        return _written(value)
    return _copied(raw)


def written_default(one: Parameter) -> Any:
    """Return how a default is written in settings; EMPTY if no setting would be read as it."""
    if one.is_required:
        return EMPTY
    reading = Typed(Settings())
    if is_plain(one.default):
        typed = reading.value(one.default, one.annotation, one.name)  # 0 for a float is 0.0 when it is read
        return typed if type(typed) is float and typed == one.default else _copied(one.default)
    written = _written(one.default)
    found = EMPTY if written is EMPTY else reading.value(written, one.annotation, one.name)
    if reading.problems:
        return EMPTY
    if isinstance(found, ObjectPlan):
        if found.target is one.default and not typing.get_args(one.annotation):
            return written  # a plain Callable, which need not be called without arguments
        return complete(found, written) if found.target in (one.default, type(one.default)) else EMPTY
    return written if type(found) is type(one.default) and found == one.default else EMPTY


def _written(value: object) -> Any:
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, date | time):
        return value.isoformat()
    if inspect.isclass(value) or inspect.isfunction(value):
        return EMPTY if "<" in value.__qualname__ else public_path(value)
    if dataclasses.is_dataclass(value):
        fields = {one.name: getattr(value, one.name) for one in dataclasses.fields(value) if one.init}
        return {name: _copied(one) for name, one in fields.items()} if all(map(is_plain, fields.values())) else EMPTY
    if type(value).__module__ == "torch":
        return str(value).removeprefix("torch.")  # a dtype or device; other texts are not read back
    return EMPTY


def public_path(target: Callable[..., object]) -> str:
    """Return the public path of a class, which is stable when files move within a package."""
    place, name = origin(target)
    for home in ("loopwright", "torch.nn", "torch.optim", "torch.optim.lr_scheduler", "torch.utils.data"):
        if place.startswith(home) and getattr(import_module(home), name, None) is target:
            return f"{home}.{name}"
    return f"{place}.{name}"


def _copied(value: object) -> Any:
    if isinstance(value, list | tuple):
        return [_copied(one) for one in value]
    return {key: _copied(one) for key, one in value.items()} if isinstance(value, dict) else value
