"""Classes in a configuration, named as Lightning names them, with arguments that are passed on in `dict_kwargs`."""

from __future__ import annotations

import enum
import inspect
import sys
from collections.abc import Callable
from functools import lru_cache
from importlib import import_module
from typing import Any

from ....cli.complete import public_path
from ....cli.names import ClassProblem, imported_object
from ....cli.parameters import parameters_of
from ....lazy import is_core
from ..imports.paths import PATHS

__all__ = ["in_lightnings_form", "path_of", "written"]

# Any in this file: values of settings.

_PLACES = frozenset(
    (
        "callbacks", "loggers", "profilers", "strategies", "plugins", "plugins.environments", "plugins.io", "cli",
        "accelerators", "core", "demos",
    )
)  # fmt: skip
# Parameters that only Loopwright's classes have: they are left out unless they are set, so that Lightning reads a file.
_OWN = frozenset(
    (
        "check_every_n_steps", "export_to_flame_graph", "keep_global_batch", "memory_timeline", "metric",
        "micro_batches", "on_trace_ready", "plain_interval_s", "precision", "ranks", "root_dir", "schedule",
        "stall_timeout", "start_method", "steps", "uneven", "variables", "x_axis",
    )
)  # fmt: skip


def in_lightnings_form(value: Any) -> Any:
    """Return settings in which classes are named by Lightning's paths.

    Args:
        value: Settings, complete, as `lw.cli` writes them.
    """
    if isinstance(value, list | tuple):
        return [in_lightnings_form(one) for one in value]
    if not isinstance(value, dict):
        return value
    node = {key: in_lightnings_form(one) for key, one in value.items()}
    if not isinstance(node.get("class_path"), str) or not isinstance(node.get("init_args"), dict):
        return node
    target = _target(node["class_path"])
    if target is None:
        return node
    known, given = parameters_of(target).named, node["init_args"]
    passed_on = {key: one for key, one in given.items() if key not in known}
    named = {key: one for key, one in given.items() if key in known}
    if _is_ours(target):
        named = {key: one for key, one in named.items() if key not in _OWN or one != known[key].default}
    path = path_of(target) if _is_ours(target) else node["class_path"]
    found = {"class_path": path, "init_args": named}
    return {**found, "dict_kwargs": passed_on} if passed_on else found


def _target(path: str) -> Any:
    try:
        return imported_object(path)  # whatever is planned has been imported
    except ClassProblem:
        return None


def _is_ours(target: Callable[..., object]) -> bool:
    return is_core(target)


def path_of(target: Any) -> str:
    """Return the path of a class or function in a configuration: Lightning's for one that stands for Lightning's."""
    found: str = _path_of(target)
    return found


@lru_cache(maxsize=512)
def _path_of(target: Any) -> str:
    name = target.__qualname__
    if _is_ours(target):
        for package in ("lightning.pytorch", "pytorch_lightning"):
            if package not in sys.modules:
                continue
            for place in _places_of(name):
                path = f"{package}.{place}" if place else package
                if getattr(import_module(path), name, None) is target:
                    return f"{path}.{name}"
    return public_path(target)


def _places_of(name: str) -> list[str]:
    """Return the modules of lightning.pytorch that have a name, the usual ones first."""
    there = [path for path, names in PATHS.items() if path.partition(".")[0] == "pytorch" and name in names.split()]
    places = [path.partition(".")[2] for path in there]
    return sorted(places, key=lambda place: (place not in _PLACES, place == "", place))


def written(value: Any) -> Any:
    """Return a value of a configuration as YAML can hold it: objects are named by their paths."""
    if isinstance(value, dict):
        return {str(key): written(one) for key, one in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [written(one) for one in value]
    if isinstance(value, enum.Enum):
        return value.name
    if value is None or isinstance(value, str | int | float | bool):
        return value
    if inspect.isclass(value) or inspect.isroutine(value):
        return path_of(value)
    return str(value) if hasattr(value, "__fspath__") or type(value).__module__ == "torch" else path_of(type(value))
