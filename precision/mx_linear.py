"""`MXLinear`: a linear layer that multiplies in MXFP8, by torchao, which this file imports."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torchao.prototype.moe_training.mxfp8_linear import _to_mxfp8_then_scaled_mm
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

BLOCK = 32  # values that share a scale
_CAST = (torch.float32, torch.float16)


class MXLinear(nn.Linear):
    """A linear layer whose three products have operands in MXFP8: the output and both gradients.

    Operands are rounded to bfloat16, then to e4m3 in blocks of 32 along the dimension that the product sums over, with
    the least power of 2 as scale in which the block's largest magnitude fits (torchao's RCEIL). Results are bfloat16.
    The rows of a batch are the summed dimension of the weight's gradient: they are padded with zeros to a multiple of
    32, which changes no value.

    The bias is added here: torchao's `MXFP8TrainingOpConfig` drops it (0.18).

    Attributes:
        is_emulated: Whether rounded operands are multiplied in bfloat16, on any device; else by kernels for Blackwell.
    """

    is_emulated: bool

    def forward(self, input: Tensor) -> Tensor:
        """Return the product, with the bias: shape (..., out_features) for an input of (..., in_features)."""
        rows = _cast(input).reshape(-1, self.in_features)
        count = rows.shape[0]
        if count % BLOCK:
            rows = nn.functional.pad(rows, (0, 0, 0, -count % BLOCK))
        output: Tensor = _to_mxfp8_then_scaled_mm(
            rows,
            _cast(self.weight),
            KernelPreference.EMULATED if self.is_emulated else KernelPreference.AUTO,
            ScaleCalculationMode.RCEIL,
        )
        output = output[:count].reshape(*input.shape[:-1], self.out_features)
        if self.bias is not None:
            output = output + self.bias.to(output.dtype)
        # A region that turns autocast off continues in its dtype.
        return output if torch.is_autocast_enabled(input.device.type) else output.to(input.dtype)


def _cast(tensor: Tensor) -> Tensor:
    return tensor.bfloat16() if tensor.dtype in _CAST else tensor
