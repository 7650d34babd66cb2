"""`UniformPrecision`: inputs, products and new tensors in one dtype. What it does to a module is its subclasses'."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

from ..protocols import Batch
from .base import DefaultDtype, Precision, PrecisionPolicy, cast_floats


class UniformPrecision(Precision):
    """Cast floating point inputs to one dtype, and make new tensors in it; steps return another one.

    Args:
        dtype: Of parameters, inputs and products.
        output_dtype: Of what steps return.
    """

    has_forward_context = True
    converts_input = True

    def __init__(self, dtype: torch.dtype, output_dtype: torch.dtype) -> None:
        self.policy = PrecisionPolicy(dtype, dtype, dtype, dtype, output_dtype)
        self._dtype, self._output_dtype = dtype, output_dtype

    def tensor_init_context(self) -> AbstractContextManager[object]:
        """Make the dtype the default one."""
        return DefaultDtype(self._dtype)

    def module_init_context(self) -> AbstractContextManager[object]:
        """Make the dtype the default one."""
        return DefaultDtype(self._dtype)

    def forward_context(self) -> AbstractContextManager[object]:
        """Make the dtype the default one."""
        return DefaultDtype(self._dtype)

    def convert_input(self, data: Batch) -> Batch:
        """Cast floating point tensors to the dtype."""
        return cast_floats(data, self._dtype)

    def convert_output(self, data: Batch) -> Batch:
        """Cast floating point tensors to the dtype of outputs."""
        return cast_floats(data, self._output_dtype)
