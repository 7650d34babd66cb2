"""Watch over the ranks: failures, stall reports, and coordinated stops."""

from __future__ import annotations

from .stop_coordinator import StopCoordinator
from .watch import Watch

__all__ = ["StopCoordinator", "StopGate", "Watch"]

StopGate = StopCoordinator
"""The class's name in version 0.1."""
