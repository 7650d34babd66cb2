"""`ClusterEnvironment`: ranks, sizes, and the address of rank 0."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping

from ...errors import ConfigError, LaunchError, MissingVariable


class ClusterEnvironment(ABC):
    """The rank of this process, and the address of rank 0.

    A custom environment derives from this class and is passed to `plugins=`.

    Args:
        variables: Environment variables; None for the current ones of this process.
    """

    # On the class, so that a subclass whose __init__ does not call ours works.
    _variables: Mapping[str, str] | None = None
    _exported: tuple[str, ...] = ()

    def __init__(self, *, variables: Mapping[str, str] | None = None) -> None:
        # os.environ itself is not kept: it cannot be pickled, and a spawned process has a separate one.
        self._variables = None if variables is os.environ else variables

    @property
    def name(self) -> str:
        """Name in messages."""
        return type(self).__name__.removesuffix("Environment")

    @property
    @abstractmethod
    def creates_processes_externally(self) -> bool:
        """Whether another program (torchrun, SLURM) starts all processes."""

    @property
    @abstractmethod
    def main_address(self) -> str:
        """Host name or address of the process with global rank 0."""

    @property
    @abstractmethod
    def main_port(self) -> int:
        """Port on which the process with global rank 0 listens; 0 if the launcher opens one later."""

    @staticmethod
    @abstractmethod
    def detect() -> bool:
        """Return whether the process runs in this environment."""

    @abstractmethod
    def world_size(self) -> int:
        """Return the number of processes."""

    def set_world_size(self, size: int) -> None:
        """Set the number of processes, if Loopwright starts them."""
        return

    @abstractmethod
    def global_rank(self) -> int:
        """Return the rank among all processes."""

    def set_global_rank(self, rank: int) -> None:
        """Set the rank among all processes, if Loopwright starts them."""
        return

    @abstractmethod
    def local_rank(self) -> int:
        """Return the rank among the processes of this node."""

    @abstractmethod
    def node_rank(self) -> int:
        """Return the rank of this node."""

    def num_local_processes(self) -> int | None:
        """Return the number of processes on this node; None if unknown."""
        return None

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Compare the started processes with the arguments.

        Args:
            num_devices: Number of processes per node, from the arguments.
            num_nodes: Number of nodes, from the arguments.

        Raises:
            ConfigError: The numbers differ; both are named.
        """
        return

    def teardown(self) -> None:
        """Remove the environment variables that this object set."""
        for name in self._exported:
            os.environ.pop(name, None)
        self._exported = ()

    # -- for subclasses ------------------------------------------------------------------------------------------

    @property
    def variables(self) -> Mapping[str, str]:
        """The environment variables that are read."""
        return os.environ if self._variables is None else self._variables

    def _number(self, name: str, default: int | None = None) -> int:
        """Return a variable as a number of 0 or more.

        Args:
            name: The variable.
            default: Value if it is not set; None if it is required.

        Raises:
            LaunchError: It is not set, or not such a number.
        """
        if default is not None and name not in self.variables:
            return default
        text = self._text(name)
        if not text.strip().isdecimal():
            raise LaunchError(
                f"Expected the environment variable {name} ({self.name}) to be an integer >= 0, got {text!r}.",
                fix=f"check the launcher or script that sets {name}.",
            )
        return int(text)

    def _text(self, name: str) -> str:
        """Return a variable; a LaunchError if it is not set."""
        text = self.variables.get(name)
        if text is None:
            raise MissingVariable(
                f"Expected the environment variable {name} from {self.name}, but it is not set.",
                fix=f"set {name} in every process, or pass another ClusterEnvironment in plugins=.",
            )
        return text

    def _port(self, default: int) -> int:
        """Return MASTER_PORT, or the default."""
        port = self._number("MASTER_PORT", default)
        if port > 65535:
            raise LaunchError(
                f"Expected MASTER_PORT to be a port from 1 to 65535, got {port}.", fix="set it to a free port."
            )
        return port

    def _export(self, name: str, value: str) -> None:
        """Set a variable for this process, unless it is set; `teardown` removes it."""
        if self._variables is None and name not in os.environ:
            os.environ[name] = value
            self._exported = (*self._exported, name)


class StartedProcesses(ClusterEnvironment):
    """An environment whose launcher has started all processes, and sets a variable for each of these numbers.

    Attributes:
        size_variable: Variable with the number of processes.
        rank_variable: Variable with the rank among all processes.
        local_rank_variable: Variable with the rank among the processes of this node.
    """

    size_variable = "WORLD_SIZE"
    rank_variable = "RANK"
    local_rank_variable = "LOCAL_RANK"

    @property
    def creates_processes_externally(self) -> bool:
        """True: the launcher has started them."""
        return True

    def world_size(self) -> int:
        """Return the number of processes, from `size_variable`."""
        return self._number(self.size_variable)

    def global_rank(self) -> int:
        """Return the rank among all processes, from `rank_variable`."""
        return self._number(self.rank_variable)

    def local_rank(self) -> int:
        """Return the rank among the processes of this node, from `local_rank_variable`."""
        return self._number(self.local_rank_variable)


def check_numbers(*rows: tuple[str, int, str, int | None], fix: str) -> None:
    """Raise a ConfigError that names all numbers that differ between arguments and environment.

    Args:
        rows: Name and value of the argument, then the name and value of the same quantity in the environment; None:
            unknown.
        fix: The remedy.
    """
    wrong = [
        f"{argument}={asked} ({where} is {found})"
        for argument, asked, where, found in rows
        if found is not None and asked != found
    ]
    if wrong:
        raise ConfigError(f"Expected arguments that match the existing processes, got {'; '.join(wrong)}.", fix=fix)
