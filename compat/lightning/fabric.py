"""`Fabric` with the private names that libraries touch."""

from __future__ import annotations

import socket
from typing import Any

from ... import fabric
from ...accelerators import Accelerator
from ...precision import Precision
from ...strategies import Strategy

__all__ = ["Fabric", "find_free_network_port"]


class Fabric(fabric.Fabric):
    """`lw.Fabric` under Lightning's name."""

    @property
    def _precision(self) -> Precision:
        return self.precision

    @property
    def _strategy(self) -> Strategy:
        return self.strategy

    @property
    def _accelerator(self) -> Accelerator:
        return self.accelerator

    @property
    def _loggers(self) -> list[Any]:  # Any: as in the base class
        return self.loggers


def find_free_network_port() -> int:
    """Return a port of this machine on which no process listens at this moment."""
    with socket.socket() as found:
        found.bind(("", 0))
        return int(found.getsockname()[1])
