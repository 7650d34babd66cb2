"""A device's work and memory: waiting for what is queued, its time, and the most memory that was in use."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from time import perf_counter

import torch


def synchronize(device: torch.device) -> None:
    """Wait until the device has completed all queued work. This delays the step; call it only at log boundaries."""
    if device.type == "xla":
        import_module("torch_xla.core.xla_model").wait_device_ops()
    elif device.type != "cpu":
        torch.accelerator.synchronize(device)


def shortest_s(function: Callable[[], object], device: torch.device, rounds: int = 3) -> float:
    """Return the seconds of the shortest of some calls without gradients, the device's work included.

    A first call, which warms up, does not count.
    """
    times = []
    with torch.no_grad():
        for _ in range(rounds + 1):
            synchronize(device)
            before = perf_counter()
            function()
            synchronize(device)
            times.append(perf_counter() - before)
    return min(times[1:])


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
