"""`BackendModes` sets what `Trainer(deterministic=, benchmark=, matmul_precision=)` ask of torch for a run, and puts it
back.
"""

from __future__ import annotations

import os
import warnings

import torch

from ..accelerators.matmul_precision import (
    State,
    capture_matmul_precision,
    restore_matmul_precision,
    set_matmul_precision,
)

__all__ = ["BackendModes"]


class BackendModes:
    """torch's switches during a run: deterministic algorithms, cuDNN's choice of algorithms, float32 products."""

    def __init__(self) -> None:
        self._algorithms: tuple[bool, bool] | None = None
        self._benchmark: bool | None = None
        self._matmul: State | None = None

    def set(
        self, *, deterministic: bool | str | None, benchmark: bool | None, matmul_precision: str | None = None
    ) -> None:
        """Set the switches that the arguments name; those that they leave open are not touched."""
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
                warnings.warn("benchmark=True lets cuDNN choose algorithms; deterministic=True may fail", stacklevel=5)
        if benchmark is not None or deterministic:
            self._benchmark = torch.backends.cudnn.benchmark
            torch.backends.cudnn.benchmark = bool(benchmark)

    def put_back(self) -> None:
        """Set the switches to what they were; nothing where none was set."""
        if self._algorithms is not None:
            enabled, warn_only = self._algorithms
            torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        if self._benchmark is not None:
            torch.backends.cudnn.benchmark = self._benchmark
        if self._matmul is not None:
            restore_matmul_precision(self._matmul)
        self._algorithms = self._benchmark = self._matmul = None
