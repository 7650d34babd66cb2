"""The precision of a DeepSpeed engine: dtypes as data for its configuration.

The engine casts parameters, keeps float32 masters, and scales losses for float16 itself. What is left here is the
context of the forward pass, or the cast of its input.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from ...errors import ConfigError
from ...precision import Precision, PrecisionPolicy
from ...precision.base import DefaultDtype, cast_floats
from ...protocols import Batch

_DTYPES = {
    "32-true": torch.float32,
    "bf16-mixed": torch.bfloat16,
    "bf16-true": torch.bfloat16,
    "16-mixed": torch.float16,
    "16-true": torch.float16,
}


class DeepSpeedPrecision(Precision):
    """Parameters in 16 bits with float32 masters, both kept by the engine.

    "bf16-mixed" and "16-mixed" run steps under autocast, so that losses and sums are float32; "bf16-true" and "16-true"
    cast the input and compute in 16 bits throughout. Parameters, gradients and masters are the same in both.

    Args:
        precision: "32-true", "bf16-mixed", "bf16-true", "16-mixed" or "16-true".
        device: Device type. None means a GPU where there is one, and does not check what the device has.

    Raises:
        ConfigError: Another precision, or one that the device does not have.
    """

    def __init__(self, precision: str = "32-true", device: str | None = None) -> None:
        dtype = _DTYPES.get(precision)
        if dtype is None:
            raise ConfigError(
                "Expected a precision with float32 master weights for strategy='deepspeed', got "
                f"precision={precision!r}.",
                fix=f"use one of {', '.join(_DTYPES)}, or strategy='ddp' or 'fsdp'.",
            )
        if dtype is torch.float16 and device == "cpu" and not _cpu_has_float16():
            raise ConfigError(
                "Expected a device with float16 arithmetic for strategy='deepspeed' and "
                f"precision={precision!r}, got a CPU without avx512_fp16 and amx_fp16.",
                fix="use 'bf16-mixed' or '32-true', or strategy='ddp' or 'fsdp', which support float16 on any CPU.",
            )
        self.precision = precision
        self.dtype = dtype
        self.device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self.is_mixed = precision.endswith("-mixed")
        self.converts_input = not self.is_mixed and dtype is not torch.float32
        self.policy = PrecisionPolicy(compute_dtype=dtype, reduce_dtype=dtype)

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Return the module as it is: the engine casts it, and makes its masters of what it was."""
        return module

    def step_context(self) -> AbstractContextManager[object]:
        """Return the context of a step, entered within the engine, which turns off an autocast from outside.

        For the mixed precisions it is autocast, for the others one in which new tensors have the 16-bit dtype.
        """
        if self.is_mixed:
            return torch.autocast(self.device, dtype=self.dtype)
        return DefaultDtype(self.dtype) if self.dtype is not torch.float32 else nullcontext()

    def convert_input(self, data: Batch) -> Batch:
        """Cast floating point tensors to the dtype of the parameters, unless autocast does."""
        return cast_floats(data, self.dtype) if self.converts_input else data

    def convert_output(self, data: Batch) -> Batch:
        """Cast floating point tensors to float32."""
        return cast_floats(data, torch.float32)


def _cpu_has_float16() -> bool:
    asked = getattr(torch.ops.mkldnn, "_is_mkldnn_fp16_supported", None)
    return bool(asked is not None and asked())
