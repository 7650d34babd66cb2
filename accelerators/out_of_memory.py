"""`is_out_of_memory`: whether an error means that memory ran out."""

from __future__ import annotations

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
