"""How processes start: in place, by whoever started them, by running the script again, or as copies of this process.

    InProcessLauncher      nothing is started: one process                               (here)
    ExternalLauncher       torchrun, SLURM, ... started all processes                    external.py
    ScriptLauncher         the user's command is run again for each further rank         script.py
    ProcessLauncher        spawn, fork or forkserver; the function's result comes back   processes.py

fabric/resolve.py chooses one, `Fabric.launch` calls it. The last three are imported when they are chosen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

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


class InProcessLauncher:
    """Run in the process that is there; the base of all launchers."""

    @property
    def starts_processes(self) -> bool:
        """Whether the function runs in other processes than this one, so that what it changes is not seen here."""
        return False

    @property
    def is_interactive_compatible(self) -> bool:
        """Whether it works in a notebook: True, nothing is started."""
        return True

    def launch(self, function: Callable[..., R], *args: Any, **kwargs: Any) -> R:
        """Call the function in every process and return what it returned on rank 0."""
        return function(*args, **kwargs)

    def local_exits(self) -> dict[int, int]:
        """Return the exit codes of processes of this node that this launcher started and that have ended.

        Returns:
            Local rank -> code, negative for a signal. Empty where nothing was started here.
        """
        return {}

    def kill(self, signum: int) -> None:
        """Send a signal to the processes that this launcher started and that still run."""
