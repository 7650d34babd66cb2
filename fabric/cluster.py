"""Who knows ranks and addresses. Called by resolve.py; later strategies ask it for their place among the processes."""

from __future__ import annotations

from abc import ABC, abstractmethod

__all__ = ["ClusterEnvironment", "LocalEnvironment"]


class ClusterEnvironment(ABC):
    """Where this process stands among all, and how the others are reached."""

    @property
    @abstractmethod
    def creates_processes_externally(self) -> bool:
        """Whether somebody else (torchrun, SLURM) starts all processes."""

    @property
    @abstractmethod
    def main_address(self) -> str:
        """Host name or address of the process with global rank 0."""

    @property
    @abstractmethod
    def main_port(self) -> int:
        """Port on which the process with global rank 0 listens."""

    @staticmethod
    @abstractmethod
    def detect() -> bool:
        """Return whether this environment is the one that the process runs in."""

    @abstractmethod
    def world_size(self) -> int:
        """Return the number of processes."""

    def set_world_size(self, size: int) -> None:
        """Set the number of processes, where Loopwright starts them."""
        return

    @abstractmethod
    def global_rank(self) -> int:
        """Return the rank among all processes."""

    def set_global_rank(self, rank: int) -> None:
        """Set the rank among all processes, where Loopwright starts them."""
        return

    @abstractmethod
    def local_rank(self) -> int:
        """Return the rank among the processes of this node."""

    @abstractmethod
    def node_rank(self) -> int:
        """Return the rank of this node."""

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Raise a ConfigError if the environment has another number of processes than the user asked for."""
        return

    def teardown(self) -> None:
        """Undo what was done to the environment."""
        return


class LocalEnvironment(ClusterEnvironment):
    """This process alone, on this machine."""

    @property
    def creates_processes_externally(self) -> bool:
        """False: there are no others."""
        return False

    @property
    def main_address(self) -> str:
        """The loopback address."""
        return "127.0.0.1"

    @property
    def main_port(self) -> int:
        """0: nothing listens."""
        return 0

    @staticmethod
    def detect() -> bool:
        """Return True: every process runs somewhere."""
        return True

    def world_size(self) -> int:
        """Return 1."""
        return 1

    def global_rank(self) -> int:
        """Return 0."""
        return 0

    def local_rank(self) -> int:
        """Return 0."""
        return 0

    def node_rank(self) -> int:
        """Return 0."""
        return 0
