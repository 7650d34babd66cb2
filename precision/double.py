"""Parameters, inputs and products in float64."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import nn

from ..protocols import Batch
from .base import DefaultDtype, Precision, PrecisionPolicy, cast_floats


class DoublePrecision(Precision):
    """Hold parameters and buffers in float64, cast floating point inputs, and make new tensors in float64."""

    precision = "64-true"
    policy = PrecisionPolicy(torch.float64, torch.float64, torch.float64, torch.float64, torch.float64)
    has_forward_context = True
    converts_input = True

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Cast floating point parameters and buffers in place and return the module."""
        return module.double()

    def tensor_init_context(self) -> AbstractContextManager[object]:
        """Make float64 the default dtype."""
        return DefaultDtype(torch.float64)

    def module_init_context(self) -> AbstractContextManager[object]:
        """Make float64 the default dtype."""
        return DefaultDtype(torch.float64)

    def forward_context(self) -> AbstractContextManager[object]:
        """Make float64 the default dtype."""
        return DefaultDtype(torch.float64)

    def convert_input(self, data: Batch) -> Batch:
        """Cast floating point tensors to float64."""
        return cast_floats(data, torch.float64)

    def convert_output(self, data: Batch) -> Batch:
        """Cast floating point tensors to float64."""
        return cast_floats(data, torch.float64)
