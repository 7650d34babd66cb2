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
    from .float8 import Float8Precision as Float8Precision
    from .formats import FORMATS as FORMATS
    from .formats import FormatCheck as FormatCheck
    from .formats import NumberFormat as NumberFormat
    from .formats import check_format as check_format
    from .half import HalfPrecision
    from .quantized import BitsandbytesPrecision as BitsandbytesPrecision
    from .xla import XLAPrecision

__all__ = [
    "FORMATS",
    "BitsandbytesPrecision",
    "DoublePrecision",
    "Float8Precision",
    "FormatCheck",
    "HalfPrecision",
    "MixedPrecision",
    "NumberFormat",
    "Precision",
    "PrecisionPolicy",
    "XLAPrecision",
    "check_format",
]

__getattr__, __dir__ = attach(
    __name__,
    {
        "BitsandbytesPrecision": "quantized",
        "DoublePrecision": "double",
        "FORMATS": "formats",
        "Float8Precision": "float8",
        "FormatCheck": "formats",
        "HalfPrecision": "half",
        "NumberFormat": "formats",
        "XLAPrecision": "xla",
        "check_format": "formats",
    },
)
