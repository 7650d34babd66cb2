"""`Int8Linear`: bitsandbytes' linear layer of 8 bits for inputs of any shape; this file imports bitsandbytes."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .quantized import import_bitsandbytes

_LINEAR: Any = import_bitsandbytes().nn.Linear8bitLt


class Int8Linear(_LINEAR):  # type: ignore[misc]  # bitsandbytes has no types
    """Flatten the input to rows: bitsandbytes (0.50, on the CPU) has no weight gradient for other shapes."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the product, with the bias: shape (..., out_features) for an input of (..., in_features)."""
        rows: Tensor = super().forward(x.reshape(-1, self.in_features))
        return rows.reshape(*x.shape[:-1], self.out_features)
