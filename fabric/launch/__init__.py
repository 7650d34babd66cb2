"""Launchers: how the processes of a run start.

InProcessLauncher      nothing is started: one process                               this file
ExternalLauncher       torchrun, SLURM, ... started all processes                    external.py
ScriptLauncher         the user's command is run again for each further rank         script.py
ProcessLauncher        spawn, fork or forkserver; the function's result comes back   processes.py
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist

from ...errors import LaunchError
from ...lazy import attach
from ...strategies import Launcher

if TYPE_CHECKING:
    from .external import ExternalLauncher as ExternalLauncher
    from .processes import ProcessLauncher as ProcessLauncher
    from .script import ScriptLauncher as ScriptLauncher

__all__ = ["ExternalLauncher", "InProcessLauncher", "Launcher", "ProcessLauncher", "ScriptLauncher"]

__getattr__, __dir__ = attach(
    __name__, {"ExternalLauncher": "external", "ProcessLauncher": "processes", "ScriptLauncher": "script"}
)

R = TypeVar("R")


def refuse_existing_ranks() -> None:
    """Raise a LaunchError in a process that the program has connected with others: these are the processes."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return
    raise LaunchError(
        "Expected a process that can start the others, got a process group of the program in which it is rank "
        f"{dist.get_rank()} of {dist.get_world_size()}, but no LOCAL_RANK, which says that the processes exist.",
        fix="set LOCAL_RANK (and, on several machines, NODE_RANK) in each process before Trainer or Fabric, or start "
        "the processes with torchrun; or omit init_process_group: the processes are started and connected for you.",
    )


class InProcessLauncher:
    """Runs in this process; the base class of all launchers."""

    @property
    def starts_processes(self) -> bool:
        """Whether the function runs in other processes, so that its changes are invisible here."""
        return False

    @property
    def is_interactive_compatible(self) -> bool:
        """Whether it works in a notebook: True."""
        return True

    def prepare(self) -> None:
        """Begin what a launch needs; called when the number of processes is known, whether or not one follows."""

    def launch(self, function: Callable[..., R], *args: Any, **kwargs: Any) -> R:
        """Call the function in every process and return the result of rank 0."""
        return function(*args, **kwargs)

    def local_exits(self) -> dict[int, int]:
        """Return the exit codes of ended processes of this node that this launcher started.

        Returns:
            Local rank -> code, negative for a signal. Empty where nothing was started here.
        """
        return {}

    def kill(self, signum: int) -> None:
        """Send a signal to the running processes that this launcher started."""
