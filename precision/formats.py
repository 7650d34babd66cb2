"""Number formats: their range and resolution, and what a tensor loses in one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ConfigError, nearest


@dataclass(frozen=True)
class NumberFormat:
    """A number format.

    Attributes:
        name: Its name.
        bits: Bits of a value, without shared scales.
        largest: Largest finite value; with a scale, in units of the scale.
        smallest: Smallest value above 0, subnormal ones included; with a scale, in units of the scale.
        epsilon: Distance from 1 to the next value.
        overflow: What a larger value becomes: "inf"; "largest" (in torch; "nan" in some hardware); or "none" where the
            scale follows the largest value.
        block: Neighboring values of the last dimension that share a scale: 0 for none, -1 for all of the dimension.
        scale: Kind of the scale.
    """

    name: str
    bits: int
    largest: float
    smallest: float
    epsilon: float
    overflow: str
    block: int = 0
    scale: str = ""


@dataclass(frozen=True)
class FormatCheck:
    """What the values of a tensor lose in a format.

    Attributes:
        format: Name of the format.
        overflow: Fraction of the finite values that are too large: they become infinite, or the largest value.
        underflow: Fraction of the values other than 0 that become 0.
        rounding_error: Root of the mean squared error, relative to that of the values, without those that overflow.
        not_finite: Fraction of values that are infinite or NaN already.
    """

    format: str
    overflow: float
    underflow: float
    rounding_error: float
    not_finite: float


# The 16 levels of nf4: quantiles of a normal distribution. Source: Dettmers et al. 2023 (QLoRA), appendix E.
_NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_FP4 = (0.0, 1 / 192, 1 / 6, 1 / 4, 1 / 3, 1 / 2, 2 / 3, 1.0)  # of bitsandbytes
_MX_BLOCK, _BNB_BLOCK = 32, 64
_POWER = "a power of 2 (e8m0)"
_ABSMAX = "the largest magnitude, float32"


def _of_dtype(name: str, dtype: torch.dtype, overflow: str, **more: Any) -> NumberFormat:  # Any: fields
    info = torch.finfo(dtype)
    return NumberFormat(name, info.bits, info.max, info.smallest_normal * info.eps, info.eps, overflow, **more)


FORMATS: dict[str, NumberFormat] = {
    one.name: one
    for one in (
        _of_dtype("float64", torch.float64, "inf"),
        _of_dtype("float32", torch.float32, "inf"),
        # float32 with the mantissa of float16. Values keep 32 bits in memory; operands of products lose the rest.
        NumberFormat("tf32", 19, 2.0**127 * (2 - 2.0**-10), 2.0**-136, 2.0**-10, "inf"),
        _of_dtype("bfloat16", torch.bfloat16, "inf"),
        _of_dtype("float16", torch.float16, "inf"),
        _of_dtype("float8_e5m2", torch.float8_e5m2, "inf"),
        _of_dtype("float8_e4m3", torch.float8_e4m3fn, "largest"),
        _of_dtype("mxfp8", torch.float8_e4m3fn, "none", block=_MX_BLOCK, scale=_POWER),
        NumberFormat("mxfp4", 4, 6.0, 0.5, 0.5, "none", _MX_BLOCK, _POWER),
        NumberFormat("int8", 8, 127.0, 1.0, 1.0, "none", -1, _ABSMAX),
        NumberFormat("nf4", 4, 1.0, _NF4[8], 1 - _NF4[14], "none", _BNB_BLOCK, _ABSMAX),
        NumberFormat("fp4", 4, 1.0, _FP4[1], 1 / 3, "none", _BNB_BLOCK, _ABSMAX),
    )
}
"""Formats by name, wide ones first. Sources: IEEE 754 (float16 to float64); OCP 8-bit Floating Point Specification 1.0
(float8); OCP Microscaling Formats Specification 1.0 (mxfp8 in e4m3, mxfp4); NVIDIA's A100 white paper (tf32)."""


def check_format(tensor: Tensor, name: str) -> FormatCheck:
    """Return what the values of a tensor would lose in a format. It reads from the device once.

    Weights, activations or gradients can be checked before a precision is chosen: a fraction of gradients that
    underflow in float16 asks for a loss scale or bfloat16.

    Args:
        tensor: Floating point values of any shape, on any device; blocks with a common scale lie in the last dimension.
        name: Name of a format: see `FORMATS`.

    Raises:
        ConfigError: The format is unknown, or the tensor is empty or has integers.
    """
    if name not in FORMATS:
        raise ConfigError(
            f"Expected a number format, got {name!r}{nearest(str(name), FORMATS)}.", fix=f"use {', '.join(FORMATS)}."
        )
    is_usable = isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.layout is torch.strided
    if not is_usable or not tensor.numel():
        got = (
            f"a tensor of shape {tuple(tensor.shape)}, {tensor.dtype} and {tensor.layout}"
            if isinstance(tensor, Tensor)
            else type(tensor).__name__
        )
        raise ConfigError(
            f"Expected a dense tensor with floating point values, got {got}.",
            fix="pass weights, activations or gradients.",
        )
    values = tensor.detach()
    values = values if values.dtype == torch.float64 else values.float()
    is_finite = values.isfinite()
    values = torch.where(is_finite, values, 0)
    rounded = round_to(values, name)
    has_overflown = is_finite & ~rounded.isfinite()
    if FORMATS[name].overflow == "largest":
        has_overflown |= values.abs() > FORMATS[name].largest
    is_lost = (values != 0) & (rounded == 0)
    # In units of the largest one, so that no square overflows or vanishes.
    unit = values.abs().amax().clamp(min=torch.finfo(values.dtype).tiny)
    error = torch.where(has_overflown, 0, (rounded.to(values.dtype) - values) / unit)
    kept = torch.where(has_overflown, 0, values / unit)
    sums = (has_overflown, is_finite, is_lost, values != 0, error.square(), kept.square())
    wide = torch.float32 if values.device.type == "mps" else torch.float64  # MPS has no float64
    found = torch.stack([one.sum(dtype=None if one.dtype == torch.bool else wide).to(wide) for one in sums]).tolist()
    overflown, finite, lost, nonzero, squared_error, squares = found
    return FormatCheck(
        name,
        overflow=overflown / max(finite, 1),
        underflow=lost / max(nonzero, 1),
        rounding_error=(squared_error / squares) ** 0.5 if squares else 0.0,
        not_finite=1 - finite / tensor.numel(),
    )


def round_to(values: Tensor, name: str) -> Tensor:
    """Return the nearest values of a format, in the dtype of `values`: those that are stored, times their scale.

    Args:
        values: Finite float32 or float64 values of any shape.
        name: Name of a format.
    """
    return _ROUNDING[name](values)


def _cast(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda values: values.to(dtype).to(values.dtype)


def _round_tf32(values: Tensor) -> Tensor:
    bits = values.float().view(torch.int32)
    # To the nearest; of two, to the even one. A carry goes into the exponent, as it should, and to infinity.
    return ((bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF).view(torch.float32).to(values.dtype)


def _in_blocks(size: int, function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return a function that rounds rows with their largest magnitude, of shape (rows, 1); a size of -1 is all."""

    def rounded(values: Tensor) -> Tensor:
        shape = values.shape or (1,)
        rows = values.reshape(-1, shape[-1])
        length = shape[-1] if size == -1 else size
        blocks = nn.functional.pad(rows, (0, -shape[-1] % length)).unflatten(1, (-1, length)).flatten(0, 1)
        found = function(blocks, blocks.abs().amax(dim=1, keepdim=True))
        return found.reshape(len(rows), -1)[:, : shape[-1]].reshape(values.shape)

    return rounded


def _to_levels(levels: tuple[float, ...]) -> Callable[[Tensor], Tensor]:
    def nearest_level(values: Tensor) -> Tensor:
        table = values.new_tensor(levels)
        return table[torch.bucketize(values, (table[1:] + table[:-1]) / 2)]

    return nearest_level


def _scaled_by_power(largest_exponent: int, largest: float, to: Callable[[Tensor], Tensor]) -> Any:
    """Return a function of blocks and their largest magnitudes. Source: OCP MX 1.0, section 6.3."""

    def rounded(blocks: Tensor, absmax: Tensor) -> Tensor:
        exponent = torch.frexp(absmax).exponent - 1 - largest_exponent
        scale = torch.ldexp(torch.ones_like(absmax), exponent.clamp(-127, 127))
        return to((blocks / scale).clamp(-largest, largest)) * scale

    return rounded


def _scaled_by_absmax(steps: float, to: Callable[[Tensor], Tensor]) -> Any:
    def rounded(blocks: Tensor, absmax: Tensor) -> Tensor:
        scale = torch.where(absmax > 0, absmax / steps, 1)
        return to(blocks / scale) * scale

    return rounded


def _signed(levels: tuple[float, ...]) -> tuple[float, ...]:
    return (*(-one for one in reversed(levels[1:])), *levels)


_ROUNDING: dict[str, Callable[[Tensor], Tensor]] = {
    "float64": _cast(torch.float64),
    "float32": _cast(torch.float32),
    "tf32": _round_tf32,
    "bfloat16": _cast(torch.bfloat16),
    "float16": _cast(torch.float16),
    "float8_e5m2": _cast(torch.float8_e5m2),
    "float8_e4m3": _cast(torch.float8_e4m3fn),
    "mxfp8": _in_blocks(_MX_BLOCK, _scaled_by_power(8, 448.0, _cast(torch.float8_e4m3fn))),
    "mxfp4": _in_blocks(_MX_BLOCK, _scaled_by_power(2, 6.0, _to_levels(_signed(_E2M1)))),
    "int8": _in_blocks(-1, _scaled_by_absmax(127.0, torch.round)),
    "nf4": _in_blocks(_BNB_BLOCK, _scaled_by_absmax(1.0, _to_levels(_NF4))),
    "fp4": _in_blocks(_BNB_BLOCK, _scaled_by_absmax(1.0, _to_levels(_signed(_FP4)))),
}
