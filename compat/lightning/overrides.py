"""Warnings about overridden methods of Lightning's strategies, precisions and accelerators that are never called.

The methods of these classes differ in Loopwright, so an override can have no effect. It must not be ignored silently.
"""

from __future__ import annotations

import warnings
from typing import Any  # Any in this file: members of the program's classes

from ...lazy import is_core
from .imports.never_called import NEVER_CALLED

__all__ = ["check_overrides", "find_own", "is_of_program"]

_STRATEGIES = ("Strategy", "DDPStrategy", "FSDPStrategy")
_NOT_CALLED = {
    "strategy": {name for owner in _STRATEGIES for name in NEVER_CALLED[owner].split()},
    "precision": set(NEVER_CALLED["Precision"].split()),
    "accelerator": set[str](),
}


def check_overrides(part: object, kind: str) -> None:
    """Warn of methods that are not called.

    Args:
        part: The object.
        kind: "strategy", "precision" or "accelerator".
    """
    own = find_own(part)
    if not own:
        return
    if kind == "precision" and "forward_context" in own:
        part.has_forward_context = True  # type: ignore[attr-defined]  # a precision
    vain = sorted(_NOT_CALLED[kind] & own.keys())
    if vain:
        warnings.warn(
            f"{type(part).__name__} overrides {', '.join(vain)} of Lightning's {kind}: Loopwright's has other methods, "
            "and does not call these. See docs/migrating.md.",
            stacklevel=4,
        )


def find_own(part: object) -> dict[str, Any]:
    """Return what the classes of the program define, by name."""
    return {
        name: value for cls in reversed(type(part).__mro__) if is_of_program(cls) for name, value in vars(cls).items()
    }


def is_of_program(cls: type) -> bool:
    """Return whether the program, or a library that it uses, defines a class."""
    return not is_core(cls) and cls.__module__ not in ("builtins", "abc", "typing")
