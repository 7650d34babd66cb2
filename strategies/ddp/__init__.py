"""Data parallel training: a full copy of the module in each process, gradients averaged."""

from __future__ import annotations

from .strategy import DDPStrategy

__all__ = ["DDPStrategy"]
