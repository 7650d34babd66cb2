"""Precision: dtypes as data (`PrecisionPolicy`), and casting, autocast and loss scale as behaviour.

Those that few runs have are imported when their name is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .base import Precision, PrecisionPolicy
from .mixed import MixedPrecision

if TYPE_CHECKING:
    from .double import DoublePrecision
    from .half import HalfPrecision
    from .xla import XLAPrecision

__all__ = ["DoublePrecision", "HalfPrecision", "MixedPrecision", "Precision", "PrecisionPolicy", "XLAPrecision"]

_LATER = {"DoublePrecision": "double", "HalfPrecision": "half", "XLAPrecision": "xla"}


def __getattr__(name: str) -> Any:  # Any: the type is that of the name asked for
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_LATER[name]}", __name__), name)
    globals()[name] = value
    return value
