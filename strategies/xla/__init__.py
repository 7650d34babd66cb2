"""Training on XLA devices: one device, SPMD over a host, sharded, or a process per device."""

from __future__ import annotations

from .strategy import XLAStrategy

__all__ = ["XLAStrategy"]
