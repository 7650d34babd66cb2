"""The CPU as an accelerator."""

from __future__ import annotations

from typing import Any

import torch

from .base import Accelerator, parse_device_count, read_machine_stats
from .registry import ACCELERATOR_REGISTRY


@ACCELERATOR_REGISTRY.register("cpu", description="the processor; devices= is a number of processes")
class CPUAccelerator(Accelerator):
    """The processor of this machine; every machine has it."""

    auto_priority = 0

    @staticmethod
    def name() -> str:
        """Return "cpu"."""
        return "cpu"

    @staticmethod
    def is_available() -> bool:
        """Return True."""
        return True

    @staticmethod
    def auto_device_count() -> int:
        """Return 1: one process uses all cores."""
        return 1

    @staticmethod
    def parse_devices(devices: Any) -> int:  # Any: whatever the user typed
        """Return the number of processes; a list of indices has no meaning on a CPU and is a ConfigError."""
        if isinstance(devices, str) and devices.strip().lower() == "auto":
            return CPUAccelerator.auto_device_count()
        return parse_device_count(devices, "cpu")

    @staticmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:  # Any: what parse_devices returned
        """Return `torch.device("cpu")` once per process."""
        return [torch.device("cpu")] * CPUAccelerator.parse_devices(devices)

    def get_device_stats(self, device: torch.device) -> dict[str, float]:
        """Return the use of processor, memory and swap of the machine, in percent.

        Raises:
            MissingDependency: psutil is not installed.
        """
        return read_machine_stats(
            needed_for="reading statistics of the CPU",
            memory="cpu_vm_percent",
            processor="cpu_percent",
            swap="cpu_swap_percent",
        )
