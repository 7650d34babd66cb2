"""A device's work and memory: waiting for what is queued, and the most memory that was in use."""

from __future__ import annotations

import sys
from importlib import import_module

import torch

__all__ = ["peak_memory_bytes", "process_peak_bytes", "synchronize"]


def synchronize(device: torch.device) -> None:
    """Wait until the device has completed all queued work. This delays the step; call it only at log boundaries."""
    if device.type == "xla":
        import_module("torch_xla.core.xla_model").wait_device_ops()
    elif device.type != "cpu":
        torch.accelerator.synchronize(device)


def peak_memory_bytes(device: torch.device) -> int | None:
    """Return the most memory that was allocated on a GPU; of this process elsewhere. None if it is unknown."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    if device.type == "mps":
        return int(torch.mps.driver_allocated_memory())
    return process_peak_bytes()


def process_peak_bytes() -> int | None:
    """Return the most host memory that this process has used; None where the system does not say."""
    if sys.platform == "win32":
        return None
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
