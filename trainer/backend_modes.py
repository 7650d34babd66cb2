"""`BackendModes` sets what `Trainer(deterministic=..., benchmark=...)` ask of torch for a run, and puts it back."""

from __future__ import annotations

import os
import warnings

import torch

__all__ = ["BackendModes"]


class BackendModes:
    """torch's switches for deterministic algorithms and for cuDNN's choice of algorithms, during a run."""

    def __init__(self) -> None:
        self._algorithms: tuple[bool, bool] | None = None
        self._benchmark: bool | None = None

    def set(self, *, deterministic: bool | str | None, benchmark: bool | None) -> None:
        """Set the switches that the arguments name; those that they leave open are not touched."""
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
        self._algorithms = self._benchmark = None
