"""Parameters, inputs and products in a 16-bit dtype."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from torch import nn

from ..errors import ArgumentTypeError, ConfigError, nearest
from ..protocols import Batch
from .base import DefaultDtype, Precision, PrecisionPolicy, cast_floats, kept_buffers

_DTYPES = {"16-true": torch.float16, "bf16-true": torch.bfloat16}


class HalfPrecision(Precision):
    """Hold parameters and buffers in 16 bits, cast floating point inputs, and make new tensors in 16 bits.

    Args:
        precision: "16-true" (float16) or "bf16-true" (bfloat16).
        keep_buffers: Patterns (as of `fnmatch`) of the names of buffers that keep their dtype, such as
            `["*.inv_freq"]`; an empty list for none. None: those that are not persistent (`persistent=False`), which
            transformers' `from_pretrained(dtype=...)` keeps, too.

    Raises:
        ConfigError: Another name.
    """

    has_forward_context = True
    converts_input = True

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
        self.precision = precision
        self.keep_buffers = keep_buffers
        self.policy = PrecisionPolicy(dtype, dtype, dtype, dtype, torch.float32)
        self._dtype = dtype

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Cast floating point parameters and buffers in place, except `keep_buffers`, and return the module."""
        with kept_buffers(module, self.keep_buffers):
            return module.half() if self._dtype is torch.float16 else module.bfloat16()

    def tensor_init_context(self) -> AbstractContextManager[object]:
        """Make the 16-bit dtype the default one."""
        return DefaultDtype(self._dtype)

    def module_init_context(self) -> AbstractContextManager[object]:
        """Make the 16-bit dtype the default one."""
        return DefaultDtype(self._dtype)

    def forward_context(self) -> AbstractContextManager[object]:
        """Make the 16-bit dtype the default one."""
        return DefaultDtype(self._dtype)

    def convert_input(self, data: Batch) -> Batch:
        """Cast floating point tensors to the 16-bit dtype."""
        return cast_floats(data, self._dtype)

    def convert_output(self, data: Batch) -> Batch:
        """Cast floating point tensors to float32."""
        return cast_floats(data, torch.float32)
