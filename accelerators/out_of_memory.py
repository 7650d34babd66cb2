"""Memory that ran out: whether an error means that, and freeing what is not in use."""

from __future__ import annotations

import gc

import torch

# Messages, in lower case, of devices and libraries that are out of memory; torch has an error class for some of them.
_SIGNS = (
    "out of memory",
    "can't allocate memory",
    "cannot allocate memory",
    "not enough memory",
    "resource_exhausted",
    "cudnn_status_not_supported",
    "cudnn_status_alloc_failed",
    "cublas_status_alloc_failed",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that a device, the host or Python is out of memory.

    torch.OutOfMemoryError and MemoryError do, and a RuntimeError whose message says so in one of the forms that devices
    and libraries use.
    """
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if not isinstance(error, RuntimeError):
        return False
    message = str(error).lower()
    return any(sign in message for sign in _SIGNS)


def free_memory(device: torch.device) -> None:
    """Free what nothing refers to, or only cycles, and return the allocator's unused memory to the device."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif device.type == "mps":
        torch.mps.empty_cache()
