"""Constants of Lightning, and functions that do nothing here."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch

from .versions import package_available

__all__ = ["call_register_accelerators", "cli_lightning_logo"]

CHECKPOINT_PAST_HPARAMS_KEYS = ("hparams", "module_arguments")
CPU_DEVICE = torch.device("cpu")
FLOAT16_EPSILON = torch.finfo(torch.float16).eps
FLOAT32_EPSILON = torch.finfo(torch.float32).eps
FLOAT64_EPSILON = torch.finfo(torch.float64).eps
min_seed_value, max_seed_value = 0, 2**32 - 1  # Lightning's names
FRAMEWORK_NAME = "pytorch-lightning"
LOCAL_FILE_URI_PREFIX = "file:"


def _from(dtype: torch.dtype) -> Callable[[object], torch.Tensor]:  # of a number
    return lambda value: torch.tensor(value, dtype=dtype)


CONVERSION_DTYPES = [(bool, _from(torch.uint8)), (int, _from(torch.int32)), (float, _from(torch.float32))]


def call_register_accelerators(registry: object, base_module: str) -> None:
    """Do nothing: the registry knows its accelerators."""


def cli_lightning_logo() -> None:
    """Print nothing."""


def _runif_reasons(
    *,
    min_cuda_gpus: int = 0,
    min_torch: str | None = None,
    max_torch: str | None = None,
    min_python: str | None = None,
    bf16_cuda: bool = False,
    tpu: bool = False,
    mps: bool | None = None,
    skip_windows: bool = False,
    standalone: bool = False,
    deepspeed: bool = False,
    dynamo: bool = False,
    linux_only: bool = False,
    **others: object,
) -> tuple[list[str], dict[str, bool]]:
    """Return why a test cannot run here, and pytest's keywords for it."""
    here = _numbers(torch.__version__.split("+")[0])
    mps_is_there = torch.backends.mps.is_available()
    reasons = {
        f"GPUs>={min_cuda_gpus}": torch.cuda.device_count() < min_cuda_gpus,
        f"torch>={min_torch}": min_torch is not None and here < _numbers(min_torch),
        f"torch<{max_torch}": max_torch is not None and here >= _numbers(max_torch),
        f"python>={min_python}": min_python is not None and sys.version_info[:3] < _numbers(min_python),
        "CUDA device bf16": bf16_cuda and not (torch.cuda.is_available() and torch.cuda.is_bf16_supported()),
        "TPU": tpu and not package_available("torch_xla"),
        "MPS": mps is True and not mps_is_there,
        "not MPS": mps is False and mps_is_there,
        "unimplemented on Windows": skip_windows and sys.platform == "win32",
        "Linux only": linux_only and sys.platform != "linux",
        "Deepspeed": deepspeed and not package_available("deepspeed"),
        "Standalone execution": standalone,
    }
    keywords = {"min_cuda_gpus": True} if min_cuda_gpus else {}
    return [reason for reason, is_missing in reasons.items() if is_missing], keywords


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())
