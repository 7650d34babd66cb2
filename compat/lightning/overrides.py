"""Warnings about overridden methods of Lightning's strategies, precisions and accelerators that are never called.

The methods of these classes differ in Loopwright, so an override can have no effect. It must not be ignored silently.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any  # Any in this file: members of the program's classes

from .imports.absent import refuse
from .never_called import NEVER_CALLED

__all__ = ["check_overrides", "find_own"]

# Methods of both, whose arguments differ -> what Loopwright passes.
_CALLED = {
    "strategy": {"backward": ("tensor",), "optimizer_step": ("optimizer",)},
    "precision": {"optimizer_step": ("optimizer",)},
    "accelerator": {},
}  # type: dict[str, dict[str, tuple[str, ...]]]
_STRATEGIES = ("Strategy", "DDPStrategy", "FSDPStrategy")
_NOT_CALLED = {
    "strategy": {name for owner in _STRATEGIES for name in NEVER_CALLED[owner].split()},
    "precision": set(NEVER_CALLED["Precision"].split()),
    "accelerator": set[str](),
}


def check_overrides(part: object, kind: str) -> None:
    """Warn of methods that are not called; refuse those that cannot be called with Loopwright's arguments.

    Args:
        part: The object.
        kind: "strategy", "precision" or "accelerator".

    Raises:
        NotServed: A method takes Lightning's arguments.
    """
    own = find_own(part)
    if not own:
        return
    if kind == "precision" and "convert_input" in own:
        part.converts_input = True  # type: ignore[attr-defined]  # a precision
    shown = type(part).__name__
    for name, arguments in _CALLED[kind].items():
        if name in own and callable(own[name]) and not _binds(own[name], len(arguments) + 1):
            refuse(
                f"{shown}.{name}({', '.join(list(inspect.signature(own[name]).parameters)[1:])}) of Lightning's {kind}",
                f"here it is called with ({', '.join(arguments)})",
            )
    vain = sorted(_NOT_CALLED[kind] & own.keys())
    if vain:
        warnings.warn(
            f"{shown} overrides {', '.join(vain)} of Lightning's {kind}: Loopwright's has other methods, and does not "
            "call these. See docs/migrating.md.",
            stacklevel=4,
        )


def find_own(part: object) -> dict[str, Any]:
    """Return what the classes of the program define, by name."""
    return {
        name: value
        for cls in reversed(type(part).__mro__)
        if cls.__module__.partition(".")[0] not in ("loopwright", "builtins", "abc", "typing")
        for name, value in vars(cls).items()
    }


def _binds(method: Callable[..., object], count: int) -> bool:
    try:
        inspect.signature(method).bind(*range(count))
    except TypeError:
        return False
    return True
