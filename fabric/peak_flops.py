"""FLOPs: of a call as torch counts them, and the peak of a device, for MFU."""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib import import_module

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from ..accelerators.matmul_precision import get_matmul_precision
from ..accelerators.usage import synchronize
from ..errors import names_nearest
from ..messages import warn

# Dense peaks in TFLOP/s as commonly quoted: without sparsity, with float32 accumulation where that differs. They have
# not been compared with vendors' data sheets or measurements, so that an MFU from "auto" is only as accurate as its
# row. The columns are half (float16 and bfloat16), tf32, float32, float64; 0 if the chip does not have such a unit. The
# first row whose words are all in the device's name is used, so more specific names come first.
_CUDA = (
    ("b300", 2250, 1125, 75, 1.2),
    ("gb200", 2500, 1250, 80, 40),
    ("b200", 2250, 1125, 75, 37),
    ("b100", 1750, 875, 60, 30),
    ("gh200", 990, 495, 67, 67),
    ("h200", 989, 495, 67, 67),
    ("h100 nvl", 835, 418, 60, 60),
    ("h100 pcie", 756, 378, 51, 51),
    ("h100", 989, 495, 67, 67),
    ("h800", 989, 495, 67, 1),
    ("h20", 148, 74, 44, 1),
    ("l40s", 362, 183, 91.6, 1.4),
    ("l40", 181, 90.5, 90.5, 1.4),
    ("l4", 121, 60, 30.3, 0.5),
    ("a100", 312, 156, 19.5, 19.5),
    ("a800", 312, 156, 19.5, 19.5),
    ("a30", 165, 82, 10.3, 10.3),
    ("a40", 150, 74.8, 37.4, 0.6),
    ("a10g", 70, 35, 35, 0.5),
    ("a10", 125, 62.5, 31.2, 0.5),
    ("a6000", 155, 77.4, 38.7, 0.6),
    ("6000 ada", 364, 182, 91.1, 1.4),
    ("rtx 5090", 210, 105, 105, 1.6),
    ("rtx 5080", 113, 56, 56, 0.9),
    ("rtx 4090", 165, 82.6, 82.6, 1.3),
    ("rtx 4080", 97.5, 48.7, 48.7, 0.8),
    ("rtx 4070", 58.3, 29.1, 29.1, 0.5),
    ("rtx 3090 ti", 80, 40, 40, 0.6),
    ("rtx 3090", 71, 35.6, 35.6, 0.6),
    ("rtx 3080", 59.5, 29.8, 29.8, 0.5),
    ("rtx 3070", 40.6, 20.3, 20.3, 0.3),
    ("titan rtx", 65, 0, 16.3, 0.5),
    ("rtx 2080 ti", 54, 0, 13.4, 0.4),
    ("t4", 65, 0, 8.1, 0.25),
    ("v100", 125, 0, 15.7, 7.8),
    ("p100", 18.7, 0, 9.3, 4.7),
    ("mi355x", 2500, 0, 157, 79),
    ("mi325x", 1307, 654, 163, 163),
    ("mi300x", 1307, 654, 163, 163),
    ("mi250x", 383, 0, 95.7, 95.7),
)
_TPU = {"v2": 45, "v3": 123, "v4": 275, "v5litepod": 197, "v5e": 197, "v5p": 459, "v6e": 918}

_said: set[str] = set()


def get_available_flops(device: torch.device, dtype: torch.dtype) -> int | None:
    """Return the device's commonly quoted peak in floating-point operations per second.

    float32 counts as tf32 where torch may use it: `torch.get_float32_matmul_precision()` is not "highest".

    Args:
        device: The device.
        dtype: The dtype of matrix products.

    Returns:
        None, with one warning, for a chip or dtype that is not in the table. None for a CPU, whose peak cannot be
        derived from its name; use `measure_peak_flops` instead.
    """
    if device.type == "xla":
        return _tpu_flops(dtype)
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    words = name.lower().replace("-", " ")
    row = next((row for row in _CUDA if set(row[0].split()) <= set(words.split())), None)
    if row is None:
        return _unknown(f"Expected a device in the table of peak FLOPs, got {name}")
    _, half, tf32, single, double = row
    may_use_tf32 = tf32 and get_matmul_precision() != "highest"
    peaks = {
        torch.float16: half,
        torch.bfloat16: 0 if row[0] in ("t4", "v100", "p100", "titan rtx", "rtx 2080 ti") else half,
        torch.float32: tf32 if may_use_tf32 else single,
        torch.float64: double,
    }
    if not peaks.get(dtype):
        return _unknown(f"The peak FLOPs of {name} in {dtype} are unknown")
    return int(peaks[dtype] * 1e12)


def _tpu_flops(dtype: torch.dtype) -> int | None:
    try:
        tpu = import_module("torch_xla.tpu")
    except ImportError:
        return None
    kind = str(tpu.get_tpu_env()["ACCELERATOR_TYPE"]).lower().split("-")[0]
    if kind not in _TPU or dtype not in (torch.bfloat16, torch.float32):
        return _unknown(f"The peak FLOPs of a TPU {kind} in {dtype} are unknown")
    return int(_TPU[kind] * 1e12)


def _unknown(what: str) -> int | None:
    """Warn once that the peak is unknown; return None."""
    if what not in _said:
        _said.add(what)
        warn(f"{what}. MFU is not computed. To compute it, pass the peak FLOP/s from the data sheet.")
    return None


def measure_peak_flops(device: torch.device, dtype: torch.dtype = torch.float32, *, seconds: float = 0.2) -> int:
    """Return the FLOP/s that the device reaches in a product of two large matrices, with the current settings.

    For devices without a data sheet, such as CPUs. This is the attainable peak, not the vendor's number.

    Args:
        device: Device to measure; nothing else should run on it.
        dtype: Dtype of the matrices.
        seconds: Duration of the measurement.
    """
    size = 1024 if device.type == "cpu" else 8192
    a = torch.ones(size, size, device=device, dtype=dtype)
    b = torch.ones(size, size, device=device, dtype=dtype)
    out = torch.empty(size, size, device=device, dtype=dtype)
    best_s = float("inf")
    ends = time.perf_counter() + seconds
    is_first = True
    while is_first or best_s == float("inf") or time.perf_counter() < ends:
        began = time.perf_counter()
        torch.mm(a, b, out=out)
        synchronize(device)
        if not is_first:  # the first one also chooses the kernel
            best_s = min(best_s, time.perf_counter() - began)
        is_first = False
    return int(2 * size**3 / best_s)


def mfu(flops: float, seconds: float, peak: float | None) -> float | None:
    """Return FLOPs in this time as a share of a peak in FLOP/s; None if the peak or the time is unknown."""
    return flops / seconds / peak if peak and seconds > 0 else None


@names_nearest
def measure_flops(
    model: nn.Module, forward_fn: Callable[[], object], loss_fn: Callable[[object], Tensor] | None = None
) -> int:
    """Return the number of floating-point operations of one call, as torch counts them: matrix products and
    convolutions.

    With a model on the meta device, nothing is computed.

    Args:
        model: The module.
        forward_fn: Runs the forward pass: `lambda: model(x)`.
        loss_fn: Computes a loss from the result of `forward_fn`; the backward pass is then counted as well. The model's
            gradients are not changed.
    """
    with FlopCounterMode(display=False) as counter:
        if loss_fn is None:
            with torch.no_grad():
                forward_fn()
        else:
            before = [(parameter, parameter.grad) for parameter in model.parameters()]
            for parameter, _ in before:
                parameter.grad = None
            try:
                loss_fn(forward_fn()).backward()
            finally:
                for parameter, gradient in before:
                    parameter.grad = gradient
    return int(counter.get_total_flops())
