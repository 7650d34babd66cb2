"""`FSDPPrecision` makes one of the usual precisions: the sharding strategy takes the plan of any."""

from __future__ import annotations

from typing import Any

import torch

from ...precision import HalfPrecision, MixedPrecision, Precision

__all__ = ["FSDPPrecision"]


class FSDPPrecision:
    """Makes the precision of this name, for FSDP."""

    def __new__(cls, precision: str = "32-true", scaler: Any = None) -> Any:  # Any: a precision, not one of this class
        """Return a MixedPrecision, a HalfPrecision or a Precision.

        Args:
            precision: "32-true", "bf16-mixed", "16-mixed", "bf16-true" or "16-true".
            scaler: A gradient scaler for "16-mixed".
        """
        if precision.endswith("-mixed"):
            return MixedPrecision(precision, "cuda" if torch.cuda.is_available() else "cpu", scaler)
        return HalfPrecision(precision) if precision != "32-true" else Precision()
