"""The precision of float32 matrix products, read and set without torch 2.9's warning.

The workaround ends with torch 2.9.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..messages import warn

MATMUL_PRECISIONS = ("highest", "high", "medium")
_OF_BACKENDS = {"tf32": "high", "bf16": "medium"}

State = tuple[str | None, dict[str, str]]
"""Result of torch's older function, None if it raises; and the setting of each backend."""


def get_matmul_precision() -> str:
    """Return "highest", "high" (tf32) or "medium" (bfloat16): torch.get_float32_matmul_precision.

    That function raises if a single backend is set (`torch.backends.cuda.matmul.fp32_precision`); then the result
    follows from the setting for CUDA devices.
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
    """Restore what `capture_matmul_precision` returned."""
    legacy, of_backends = state
    set_matmul_precision(legacy or "highest")  # None: only backends had been set
    for name, backend in _backends():
        if name in of_backends:
            backend.matmul.fp32_precision = of_backends[name]


def _backends() -> tuple[tuple[str, Any], ...]:  # Any: torch's modules of backends
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


class BackendModes:
    """torch's switches during a run: deterministic algorithms, cuDNN's choice of algorithms, float32 products."""

    def __init__(self) -> None:
        self._algorithms: tuple[bool, bool] | None = None
        self._benchmark: bool | None = None
        self._matmul: State | None = None

    def set(
        self, *, deterministic: bool | str | None, benchmark: bool | None, matmul_precision: str | None = None
    ) -> None:
        """Set the switches of the arguments that are not None."""
        if matmul_precision is not None:
            self._matmul = capture_matmul_precision()
            set_matmul_precision(matmul_precision)
        if deterministic:
            self._algorithms = (
                torch.are_deterministic_algorithms_enabled(),
                torch.is_deterministic_algorithms_warn_only_enabled(),
            )
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True, warn_only=deterministic == "warn")
            if benchmark:
                warn("benchmark=True lets cuDNN choose algorithms; deterministic=True may fail")
        if benchmark is not None or deterministic:
            self._benchmark = torch.backends.cudnn.benchmark
            torch.backends.cudnn.benchmark = bool(benchmark)

    def put_back(self) -> None:
        """Restore the switches that `set` has changed."""
        if self._algorithms is not None:
            enabled, warn_only = self._algorithms
            torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        if self._benchmark is not None:
            torch.backends.cudnn.benchmark = self._benchmark
        if self._matmul is not None:
            restore_matmul_precision(self._matmul)
        self._algorithms = self._benchmark = self._matmul = None
