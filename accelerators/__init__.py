"""Accelerators: one class per kind of device, and the registry of their names."""

from __future__ import annotations

from .base import Accelerator
from .cpu import CPUAccelerator
from .cuda import CUDAAccelerator, find_usable_cuda_devices
from .mps import MPSAccelerator
from .registry import ACCELERATOR_REGISTRY, AcceleratorRegistry
from .xla import XLAAccelerator

__all__ = [
    "ACCELERATOR_REGISTRY",
    "Accelerator",
    "AcceleratorRegistry",
    "CPUAccelerator",
    "CUDAAccelerator",
    "MPSAccelerator",
    "XLAAccelerator",
    "find_usable_cuda_devices",
]
