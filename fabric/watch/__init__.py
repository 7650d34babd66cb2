"""What keeps several processes from waiting for each other for ever: who failed, where all stand, and where to stop."""

from __future__ import annotations

from .stop_coordinator import StopGate
from .watch import Watch

__all__ = ["StopGate", "Watch"]
