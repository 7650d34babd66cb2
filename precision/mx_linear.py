"""`MXLinear`: a linear layer that multiplies in MXFP8, by torchao, which this file imports."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ModuleError
from .float8 import errors_only, quiet_torchao

quiet_torchao()  # here, since ranks that wait for their launch import this file by itself
with errors_only("torch.utils._pytree"):
    from torchao.prototype.moe_training.mxfp8_linear import mx_mm
    from torchao.prototype.mx_formats.config import (
        MXFP8Dim0CastKernelChoice,
        MXFP8Dim1CastKernelChoice,
        ScaleCalculationMode,
    )
    from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

# Any in this file: torchao.

_BLOCK = 32  # values that share a scale
_CAST = (torch.float32, torch.float16)
_OPTIONS = (
    MXFP8Dim0CastKernelChoice.TRITON, MXFP8Dim1CastKernelChoice.CUDA, ScaleCalculationMode.RCEIL, False,
)  # fmt: skip


@torch._dynamo.allow_in_graph
class _Product(mx_mm):  # type: ignore[misc]  # torchao has no types
    """torchao's three products, without gradients of gradients: what torchao returns for these has no graph."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise ModuleError(
                "Expected a backward pass without create_graph=True through a layer in MXFP8, whose gradients cannot "
                "be differentiated.",
                fix="use precision='bf16-mixed', or name the layer in Float8Precision(ignore_modules=...).",
            )
        return mx_mm.backward(ctx, gradient)


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
        if count % _BLOCK:
            rows = nn.functional.pad(rows, (0, 0, 0, -count % _BLOCK))
        kernels = KernelPreference.EMULATED if self.is_emulated else KernelPreference.AUTO
        e4m3 = torch.float8_e4m3fn
        output: Tensor = _Product.apply(
            rows.contiguous(), _cast(self.weight).contiguous(), e4m3, e4m3, e4m3, _BLOCK, kernels, *_OPTIONS
        )
        output = output[:count].reshape(*input.shape[:-1], self.out_features)
        if self.bias is not None:
            output = output + self.bias.to(output.dtype)
        # A region that turns autocast off continues in its dtype.
        return output if torch.is_autocast_enabled(input.device.type) else output.to(input.dtype)


def _cast(tensor: Tensor) -> Tensor:
    return tensor.bfloat16() if tensor.dtype in _CAST else tensor
