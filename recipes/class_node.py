"""`class_node`: a class that a setting names, with its arguments, checked without creating an object."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..settings.complete import public_path
from ..settings.names import ClassProblem, find_maker
from ..settings.tree import Settings
from ..settings.typed import Typed

# Any in this file: arguments of classes that the user names.


def class_node(name: str, value: str | Mapping[str, Any] | None) -> tuple[dict[str, Any] | None, list[str]]:
    """Return a class by its path with its arguments, and what is wrong with them.

    Args:
        name: "lr_scheduler", or a setting whose name ends with "optimizer".
        value: Name of a class, or a mapping with `class_path` and `init_args`.

    Returns:
        `{"class_path": ..., "init_args": {...}}`, None without a class; and `name: Expected ..., got ...`.
    """
    if value is None:
        return None, []
    if isinstance(value, Mapping) and "class_path" not in value:
        return None, [f"{name}: Expected a class, as in {name}=SGD, got arguments only: {', '.join(value)}."]
    path, arguments = (value, {}) if isinstance(value, str) else (value["class_path"], dict(value.get("init_args", {})))
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

    base: type[Any]
    base, *first = (Optimizer, "params") if name.endswith("optimizer") else (LRScheduler, "optimizer", "num_steps")
    try:
        found = find_maker(str(path), base)
    except ClassProblem as problem:
        return None, [f"{name}: {problem}."]
    typed = Typed(Settings())
    typed.plan(found, arguments, name, given=frozenset(first))
    return {"class_path": public_path(found), "init_args": arguments}, [f"{one}." for one in typed.problems]
