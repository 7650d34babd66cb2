"""`Fabric` with the private names that libraries touch."""

from __future__ import annotations

import socket
from typing import Any

from ... import fabric

__all__ = ["Fabric", "find_free_network_port"]


class Fabric(fabric.Fabric):
    """`lw.Fabric` under Lightning's name."""

    @property
    def _precision(self) -> Any:  # Any: a precision of any kind
        return self.precision

    @property
    def _strategy(self) -> object:  # a strategy of any kind
        return self.strategy

    @property
    def _accelerator(self) -> Any:  # Any: an accelerator of any kind
        return self.accelerator

    @property
    def _loggers(self) -> Any:  # Any: a list of loggers
        return self.loggers


def find_free_network_port() -> int:
    """Return a port of this machine on which no process listens at this moment."""
    with socket.socket() as found:
        found.bind(("", 0))
        return int(found.getsockname()[1])
