"""Parameters, inputs and products in a 16-bit dtype."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ..errors import ArgumentTypeError, ConfigError, nearest
from .base import kept_buffers
from .uniform import UniformPrecision

_DTYPES = {"16-true": torch.float16, "bf16-true": torch.bfloat16}


class HalfPrecision(UniformPrecision):
    """Hold parameters and buffers in 16 bits, cast floating point inputs, and make new tensors in 16 bits.

    Args:
        precision: "16-true" (float16) or "bf16-true" (bfloat16).
        keep_buffers: Patterns (as of `fnmatch`) of the names of buffers that keep their dtype, such as
            `["*.inv_freq"]`; an empty list for none. None: those that are not persistent (`persistent=False`), which
            transformers' `from_pretrained(dtype=...)` keeps, too.

    Raises:
        ConfigError: Another name.
    """

    def __init__(self, precision: str = "16-true", *, keep_buffers: Sequence[str] | None = None) -> None:
        dtype = _DTYPES.get(precision)
        if dtype is None:
            raise ConfigError(
                f"HalfPrecision was given precision={precision!r}{nearest(str(precision), _DTYPES)}.",
                fix='pass "16-true" or "bf16-true".',
            )
        if isinstance(keep_buffers, str):
            raise ArgumentTypeError(
                f"Expected keep_buffers to be a list of patterns or None, got {keep_buffers!r}.",
                fix=f"pass [{keep_buffers!r}].",
            )
        super().__init__(dtype, torch.float32)
        self.precision = precision
        self.keep_buffers = keep_buffers

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Cast floating point parameters and buffers in place, except `keep_buffers`, and return the module."""
        with kept_buffers(module, self.keep_buffers):
            return module.half() if self._dtype is torch.float16 else module.bfloat16()
