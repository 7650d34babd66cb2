"""Precision: dtypes as data (`PrecisionPolicy`), and casting, autocast and loss scale as behavior.

Those that few runs have are imported when their name is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..lazy import attach
from .base import Precision, PrecisionPolicy
from .mixed import MixedPrecision

if TYPE_CHECKING:
    from .double import DoublePrecision
    from .half import HalfPrecision
    from .xla import XLAPrecision

__all__ = ["DoublePrecision", "HalfPrecision", "MixedPrecision", "Precision", "PrecisionPolicy", "XLAPrecision"]

__getattr__, __dir__ = attach(__name__, {"DoublePrecision": "double", "HalfPrecision": "half", "XLAPrecision": "xla"})
