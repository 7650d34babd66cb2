"""How exactly float32 matrices are multiplied, asked and set without torch 2.9's warning.

Called by cuda.py, and in fabric/ by what starts processes and what knows the peaks of chips. torch 2.9 calls the names
that all versions have old, and warns at their first use, in torch.get_float32_matmul_precision itself; torch 2.13
does not. The workaround ends with torch 2.9.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = [
    "MATMUL_PRECISIONS",
    "capture_matmul_precision",
    "get_matmul_precision",
    "restore_matmul_precision",
    "set_matmul_precision",
]

MATMUL_PRECISIONS = ("highest", "high", "medium")
_OF_BACKENDS = {"tf32": "high", "bf16": "medium"}

State = tuple[str | None, dict[str, str]]
"""What torch's older function says, None where it refuses; and its setting of each backend."""


def get_matmul_precision() -> str:
    """Return "highest", "high" (tf32) or "medium" (bfloat16): torch.get_float32_matmul_precision.

    Where somebody has set a backend alone (`torch.backends.cuda.matmul.fp32_precision`), that function refuses to
    answer; then it is what the setting for CUDA devices means.
    """
    legacy, of_backends = capture_matmul_precision()
    return legacy if legacy is not None else _OF_BACKENDS.get(of_backends["cuda"], "highest")


def capture_matmul_precision() -> State:
    """Return all of torch's settings, for `restore_matmul_precision`."""
    legacy: str | None = None
    with _without_the_warning():
        try:
            legacy = torch.get_float32_matmul_precision()
        except RuntimeError as error:
            if "mix of the legacy and new APIs" not in str(error):
                raise
    found = {name: getattr(backend.matmul, "fp32_precision", None) for name, backend in _backends()}
    return legacy, {name: value for name, value in found.items() if value is not None}


def restore_matmul_precision(state: State) -> None:
    """Put back what `capture_matmul_precision` returned."""
    legacy, of_backends = state
    set_matmul_precision(legacy or "highest")  # where it refused to answer, only backends had been set
    for name, backend in _backends():
        if name in of_backends:
            backend.matmul.fp32_precision = of_backends[name]


def _backends() -> tuple[tuple[str, Any], ...]:  # Any: modules that torch gives attributes of its own
    return ("cuda", torch.backends.cuda), ("mkldnn", torch.backends.mkldnn)


def set_matmul_precision(precision: str) -> None:
    """Set what `get_matmul_precision` returned, for this process.

    Args:
        precision: "highest", "high" or "medium".
    """
    with _without_the_warning():
        torch.set_float32_matmul_precision(precision)


@contextmanager
def _without_the_warning() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Please use the new API settings to control TF32")
        yield
