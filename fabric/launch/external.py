"""`ExternalLauncher`: processes started by torchrun, SLURM, MPI, a ScriptLauncher, or manually."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from . import InProcessLauncher
from .parent_watchdog import watch_parent

if TYPE_CHECKING:
    from ...protocols import Cluster
    from .script import ScriptLauncher

R = TypeVar("R")


class ExternalLauncher(InProcessLauncher):
    """Runs in place, in each of the existing processes.

    Args:
        cluster: Provides the number of started processes.
        num_processes: Number of processes per node, from the user's arguments.
        num_nodes: Number of nodes, from the user's arguments.
    """

    def __init__(self, cluster: Cluster, num_processes: int, num_nodes: int = 1) -> None:
        self._cluster = cluster
        self._num_processes = num_processes
        self._num_nodes = num_nodes
        # As early as possible: a process that is still building its data must end with its parent, too.
        watch_parent()

    def local_exits(self) -> dict[int, int]:
        """Return the exit codes of ended processes that an earlier ScriptLauncher of this process started."""
        owner = self._owner()
        return {} if owner is None else owner.local_exits()

    def kill(self, signum: int) -> None:
        """Send a signal to the processes that an earlier ScriptLauncher of this process started."""
        owner = self._owner()
        if owner is not None:
            owner.kill(signum)

    def _owner(self) -> ScriptLauncher | None:
        # Not imported, or not completely, means that nothing was started.
        started_here = getattr(sys.modules.get(f"{__package__}.script"), "started_here", None)
        return None if started_here is None else started_here()

    def launch(self, function: Callable[..., R], *args: Any, **kwargs: Any) -> R:
        """Call the function and return what it returned on this rank.

        Raises:
            ConfigError: The number of started processes differs from the arguments.
        """
        self._cluster.validate_settings(self._num_processes, self._num_nodes)
        return function(*args, **kwargs)
