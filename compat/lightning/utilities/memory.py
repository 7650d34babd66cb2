"""Lightning's helpers for memory and devices."""

from __future__ import annotations

import gc

import torch
from torch import Tensor

from ....accelerators import CPUAccelerator, CUDAAccelerator, MPSAccelerator
from ....accelerators.out_of_memory import is_out_of_memory
from ....data import apply_to_collection

__all__ = [
    "garbage_collection_cuda",
    "get_cpu_stats",
    "get_device_stats",
    "get_nvidia_gpu_stats",
    "is_cuda_available",
    "is_cuda_out_of_memory",
    "is_cudnn_snafu",
    "is_oom_error",
    "is_out_of_cpu_memory",
    "num_cuda_devices",
    "recursive_detach",
]


def recursive_detach(in_dict: object, to_cpu: bool = False) -> object:  # a nested collection
    """Return a collection whose tensors are detached."""
    return apply_to_collection(in_dict, Tensor, lambda tensor: tensor.detach().cpu() if to_cpu else tensor.detach())


def is_oom_error(exception: BaseException) -> bool:
    """Return whether an error is an out-of-memory error."""
    return is_out_of_memory(exception)


def is_cuda_out_of_memory(exception: BaseException) -> bool:
    """Return whether the memory of a CUDA device ran out."""
    return isinstance(exception, torch.cuda.OutOfMemoryError)


def is_cudnn_snafu(exception: BaseException) -> bool:
    """Return whether cuDNN failed as it does when memory ran out."""
    return isinstance(exception, RuntimeError) and "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED" in str(exception)


def is_out_of_cpu_memory(exception: BaseException) -> bool:
    """Return whether the host's memory ran out."""
    return is_out_of_memory(exception) and not is_cuda_out_of_memory(exception) and not is_cudnn_snafu(exception)


def garbage_collection_cuda() -> None:
    """Free what nothing refers to, on the host and on CUDA devices."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def is_cuda_available() -> bool:
    """Return whether there is a CUDA device."""
    return torch.cuda.is_available()


def num_cuda_devices() -> int:
    """Return how many CUDA devices there are."""
    return torch.cuda.device_count()


def get_cpu_stats() -> dict[str, float]:
    """Return what the host's processor and memory are used for."""
    return CPUAccelerator().get_device_stats(torch.device("cpu"))


def get_nvidia_gpu_stats(device: torch.device) -> dict[str, float]:
    """Return what a CUDA device's memory is used for."""
    return CUDAAccelerator().get_device_stats(device)


def get_device_stats() -> dict[str, float]:
    """Return what Apple's device is used for."""
    return MPSAccelerator().get_device_stats(torch.device("mps"))
