"""Lightning's helpers of loggers: parameters as loggers take them, prefixes of keys, and files that are new."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import os
from collections.abc import Mapping, MutableMapping
from typing import Any

from torch import Tensor

__all__ = [
    "add_prefix",
    "convert_json_serializable",
    "convert_params",
    "flatten_dict",
    "sanitize_callable_params",
    "sanitize_params",
    "scan_checkpoints",
]

# Any in this file: parameters of any type.


def convert_params(params: Any) -> dict[str, Any]:
    """Return parameters as a dict: those of a namespace, and none for None."""
    if params is None:
        return {}
    return vars(params) if isinstance(params, argparse.Namespace) else params


def sanitize_callable_params(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return parameters in which a class is its name, and a function what it returns, or its name if that fails."""
    return {name: _without_callable(value) for name, value in params.items()}


def _without_callable(value: Any) -> Any:
    if not callable(value):
        return value
    if inspect.isclass(value):
        return value.__name__
    name = getattr(value, "__name__", None)
    try:
        returned = value()
    except Exception:  # whatever the function needs
        return name
    return name if callable(returned) else returned


def flatten_dict(params: Mapping[Any, Any], delimiter: str = "/", parent_key: str = "") -> dict[str, Any]:
    """Return nested parameters with keys such as `a/b`; lists of dicts are nested by number."""
    flat: dict[str, Any] = {}
    for name, value in params.items():
        key = f"{parent_key}{delimiter}{name}" if parent_key else str(name)
        if isinstance(value, argparse.Namespace):
            value = vars(value)
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            value = dataclasses.asdict(value)
        if isinstance(value, list) and all(isinstance(item, MutableMapping) for item in value):
            value = dict(enumerate(value))
        flat.update(flatten_dict(value, delimiter, key) if isinstance(value, MutableMapping) else {key: value})
    return flat


def sanitize_params(params: dict[str, Any]) -> dict[str, Any]:
    """Make texts of everything but numbers, texts and tensors; in place, and returned."""
    for name, value in params.items():
        plain = value.item() if type(value).__module__ == "numpy" and getattr(value, "ndim", None) == 0 else value
        params[name] = plain if type(plain) in (bool, int, float, str, Tensor) else str(plain)
    return params


def convert_json_serializable(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return parameters in which whatever JSON cannot write is a text."""
    return {name: value if _is_for_json(value) else str(value) for name, value in params.items()}


def _is_for_json(value: Any) -> bool:
    if value is None or isinstance(value, bool | int | float | str | list | dict):
        return True
    try:
        json.dumps(value)
    except (TypeError, OverflowError, ValueError):
        return False
    return True


def add_prefix(metrics: Mapping[str, Any], prefix: str, separator: str) -> Mapping[str, Any]:
    """Return metrics whose names have a prefix, if there is one."""
    return {f"{prefix}{separator}{name}": value for name, value in metrics.items()} if prefix else metrics


def scan_checkpoints(
    checkpoint_callback: Any, logged_model_time: Mapping[str, float]
) -> list[tuple[float, str, Any, str]]:
    """Return the files of a ModelCheckpoint that a logger has not logged: time, path, score and kind, the oldest first.

    Args:
        checkpoint_callback: The callback.
        logged_model_time: Path -> time of what was logged.
    """
    found = {getattr(checkpoint_callback, "last_model_path", ""): (checkpoint_callback.current_score, "latest")}
    found[getattr(checkpoint_callback, "best_model_path", "")] = (checkpoint_callback.best_model_score, "best")
    found.update({path: (score, "best_k") for path, score in checkpoint_callback.best_k_models.items()})
    times = {path: os.path.getmtime(path) for path in found if os.path.isfile(path)}
    new = {path: time for path, time in times.items() if logged_model_time.get(path, float("-inf")) < time}
    return sorted((time, path, *found[path]) for path, time in new.items())
