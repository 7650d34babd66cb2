"""Fault tolerance between replica groups, under torchft's Manager: `Trainer(fault_tolerance=TorchFT(...))`."""

from __future__ import annotations

from .options import TorchFT

__all__ = ["TorchFT"]
