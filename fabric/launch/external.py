"""Processes that somebody else started: torchrun, SLURM, MPI, a ScriptLauncher, or the user's own hand."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from . import InProcessLauncher
from .parent_watchdog import tie_to_parent

if TYPE_CHECKING:
    from ..cluster import ClusterEnvironment
    from .script import ScriptLauncher

__all__ = ["ExternalLauncher"]

R = TypeVar("R")


class ExternalLauncher(InProcessLauncher):
    """Run in place, in each of the processes that are there already.

    Args:
        cluster: Knows how many were started.
        num_processes: Processes per node that the user's arguments ask for.
        num_nodes: Number of nodes that they ask for.
    """

    def __init__(self, cluster: ClusterEnvironment, num_processes: int, num_nodes: int = 1) -> None:
        self._cluster = cluster
        self._num_processes = num_processes
        self._num_nodes = num_nodes
        # As early as can be: a process that is still building its data must end with its parent, too.
        tie_to_parent()

    def local_exits(self) -> dict[int, int]:
        """Return the exit codes of processes that have ended, where this process is the one that started the others.

        That is so when an earlier run of the same script started them with a ScriptLauncher.
        """
        owner = self._owner()
        return {} if owner is None else owner.local_exits()

    def kill(self, signum: int) -> None:
        """Send a signal to the processes that an earlier ScriptLauncher of this process started."""
        owner = self._owner()
        if owner is not None:
            owner.kill(signum)

    def _owner(self) -> ScriptLauncher | None:
        script = sys.modules.get(f"{__package__}.script")  # not imported: then nothing was started
        return None if script is None else script.started_here()

    def launch(self, function: Callable[..., R], *args: Any, **kwargs: Any) -> R:
        """Call the function and return what it returned on this rank.

        Raises:
            ConfigError: The processes that were started are not those that the arguments ask for.
        """
        self._cluster.validate_settings(self._num_processes, self._num_nodes)
        return function(*args, **kwargs)
