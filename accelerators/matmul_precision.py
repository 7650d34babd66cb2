"""How exactly float32 matrices are multiplied, asked and set without torch 2.9's warning.

Called by cuda.py, and in fabric/ by what starts processes and what knows the peaks of chips. torch 2.9 calls the names
that all versions have old, and warns at their first use, in torch.get_float32_matmul_precision itself; torch 2.13
does not. The workaround ends with torch 2.9.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["get_matmul_precision", "set_matmul_precision"]


def get_matmul_precision() -> str:
    """Return "highest", "high" (tf32) or "medium" (bfloat16): torch.get_float32_matmul_precision."""
    with _without_the_warning():
        return torch.get_float32_matmul_precision()


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
