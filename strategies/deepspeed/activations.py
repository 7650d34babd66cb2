"""What a DeepSpeedStrategy tells `deepspeed.checkpointing`, which is one for the whole process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .config import activation_options

__all__ = ["Activations"]


class Activations:
    """Whether this strategy has configured `deepspeed.checkpointing`, and how.

    Attributes:
        are_kept: Whether what a forward pass leaves is kept in buffers until a backward pass.
    """

    def __init__(self) -> None:
        self.are_kept = False
        self._has_configured = False

    def configure(self, checkpointing: Any, config: Mapping[str, Any], device_type: str) -> None:
        """Tell DeepSpeed what the configuration says of activations.

        A script that has configured it before keeps that where the configuration says nothing.

        Args:
            checkpointing: `deepspeed.checkpointing`.
            config: DeepSpeed's.
            device_type: Of the engine.
        """
        options = activation_options(config)
        self._has_configured = any(options.values())
        if device_type == "cpu":
            # They are there already; DeepSpeed (0.19) would take its copy, which is none, for free to be emptied.
            options["checkpoint_in_cpu"] = False
        if self._has_configured or not checkpointing.is_configured():
            checkpointing.configure(None, **options)
        self.are_kept = bool(options["contiguous_checkpointing"] or options["checkpoint_in_cpu"])

    def forget(self) -> None:
        """Leave nothing to a later run of this process."""
        if self._has_configured:
            import deepspeed

            deepspeed.checkpointing.configure(None)
            self._has_configured = False
