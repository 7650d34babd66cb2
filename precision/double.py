"""Parameters, inputs and products in float64."""

from __future__ import annotations

import torch
from torch import nn

from .uniform import UniformPrecision


class DoublePrecision(UniformPrecision):
    """Hold parameters and buffers in float64, cast floating point inputs, and make new tensors in float64."""

    precision = "64-true"

    def __init__(self) -> None:
        super().__init__(torch.float64, torch.float64)

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Cast floating point parameters and buffers in place and return the module."""
        return module.double()
