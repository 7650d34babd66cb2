"""Precision: dtypes as data (`PrecisionPolicy`), and casting, autocast and loss scale as behaviour."""

from __future__ import annotations

from .base import Precision, PrecisionPolicy
from .double import DoublePrecision
from .half import HalfPrecision
from .mixed import MixedPrecision

__all__ = ["DoublePrecision", "HalfPrecision", "MixedPrecision", "Precision", "PrecisionPolicy"]
