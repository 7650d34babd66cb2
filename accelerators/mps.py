"""Apple's graphics processor as an accelerator."""

from __future__ import annotations

import os
from typing import Any

import torch

from .base import Accelerator, parse_device_indices, read_machine_stats
from .registry import ACCELERATOR_REGISTRY


@ACCELERATOR_REGISTRY.register("mps", description="Apple's graphics processor; there is one")
class MPSAccelerator(Accelerator):
    """The graphics processor of an Apple-silicon machine. The environment variable DISABLE_MPS=1 hides it."""

    auto_priority = 20
    is_gpu = True

    @staticmethod
    def name() -> str:
        """Return "mps"."""
        return "mps"

    @staticmethod
    def is_available() -> bool:
        """Return whether torch can use it, and DISABLE_MPS is not 1."""
        return os.environ.get("DISABLE_MPS", "0") != "1" and torch.backends.mps.is_available()

    @staticmethod
    def auto_device_count() -> int:
        """Return 1."""
        return 1

    @staticmethod
    def parse_devices(devices: Any) -> list[int]:  # Any: whatever the user typed
        """Return [0]; any other device is a ConfigError."""
        return parse_device_indices(devices, "mps", [0] if MPSAccelerator.is_available() else [])

    @staticmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:  # Any: what parse_devices returned
        """Return `torch.device("mps", i)` for each index."""
        return [torch.device("mps", index) for index in devices]

    def teardown(self) -> None:
        """Release cached memory to the system."""
        if self.is_available():
            torch.mps.empty_cache()

    def get_device_stats(self, device: torch.device) -> dict[str, float]:
        """Return the use of the machine's shared memory, processor and swap, in percent.

        Raises:
            MissingDependency: psutil is not installed.
        """
        return read_machine_stats(
            needed_for="reading statistics of the MPS device",
            memory="M1_vm_percent",
            processor="M1_percent",
            swap="M1_swap_percent",
        )
