"""Settings with the defaults of their classes, as they are printed and saved. Called by app.py."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from .parameters import parameters_of
from .typed import Plan

__all__ = ["complete", "is_plain", "public_path"]

# Any in this file: values of settings.


def is_plain(value: Any) -> bool:
    """Return whether YAML can hold a value."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and is_plain(one) for key, one in value.items())
    if isinstance(value, list | tuple):
        return all(is_plain(one) for one in value)
    return value is None or isinstance(value, str | int | float | bool)


def complete(value: Any, raw: Any, *, names_class: bool = False) -> Any:
    """Return what stands for a value in the saved settings.

    Args:
        value: What is made of the settings: plans, and values that have their types.
        raw: The settings.
        names_class: Whether a plan is written with its class though the settings did not name it.
    """
    if isinstance(value, Plan):
        is_node = isinstance(raw, dict) and "class_path" in raw
        given = raw["init_args"] if is_node else raw if isinstance(raw, dict) else {}
        arguments = {}
        for name, one in parameters_of(value.target).named.items():
            if name in value.arguments:
                arguments[name] = complete(value.arguments[name], given.get(name))
            elif not one.is_required and is_plain(one.default):
                arguments[name] = _copied(one.default)
        for name, one in value.arguments.items():
            arguments.setdefault(name, complete(one, given.get(name)))
        if not (names_class or is_node or isinstance(raw, str)):
            return arguments
        path = public_path(value.target)
        return {
            "class_path": path,
            "init_args": arguments,
            **({"partial": True} if is_node and raw.get("partial") else {}),
        }
    if isinstance(value, list) and isinstance(raw, list) and len(value) == len(raw):
        return [complete(one, below) for one, below in zip(value, raw, strict=True)]
    if isinstance(value, dict) and isinstance(raw, dict) and list(value) == list(raw):
        return {key: complete(one, raw[key]) for key, one in value.items()}
    if isinstance(value, str | int | float | bool) and not hasattr(value, "value"):
        return value
    if isinstance(value, Path):
        return str(value)
    return _copied(raw)


def public_path(target: Any) -> str:
    """Return the path under which users know a class; it stays when files move within a package."""
    name = target.__qualname__
    for home in ("loopwright", "torch.nn", "torch.optim", "torch.optim.lr_scheduler", "torch.utils.data"):
        if target.__module__.startswith(home) and getattr(import_module(home), name, None) is target:
            return f"{home}.{name}"
    return f"{target.__module__}.{name}"


def _copied(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_copied(one) for one in value]
    return {key: _copied(one) for key, one in value.items()} if isinstance(value, dict) else value
