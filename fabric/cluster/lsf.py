"""`LSFEnvironment`: processes started by IBM LSF's jsrun."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

from ...errors import LaunchError
from .base import StartedProcesses, check_numbers

_NEEDED = {"LSB_JOBID", "LSB_DJOB_RANKFILE", "JSM_NAMESPACE_LOCAL_RANK", "JSM_NAMESPACE_SIZE"}


class LSFEnvironment(StartedProcesses):
    """The variables of LSF and jsrun: JSM_NAMESPACE_SIZE, _RANK and _LOCAL_RANK, and the host file LSB_DJOB_RANKFILE.

    Args:
        variables: Environment variables; None reads this process's variables on each access.

    Raises:
        LaunchError: The host file cannot be read, or does not contain this host.
    """

    size_variable = "JSM_NAMESPACE_SIZE"
    rank_variable = "JSM_NAMESPACE_RANK"
    local_rank_variable = "JSM_NAMESPACE_LOCAL_RANK"

    def __init__(self, *, variables: Mapping[str, str] | None = None) -> None:
        super().__init__(variables=variables)
        hosts = _read_hosts(self._text("LSB_DJOB_RANKFILE"))
        self._node_rank = _place(socket.gethostname(), hosts)
        self._main_address = self.variables.get("MASTER_ADDR") or hosts[0]
        self._main_port = self._port(10000 + self._number("LSB_JOBID") % 1000)
        self._export("MASTER_ADDR", self._main_address)
        self._export("MASTER_PORT", str(self._main_port))

    @property
    def main_address(self) -> str:
        """MASTER_ADDR, else the first host after the launch host; exported."""
        return self._main_address

    @property
    def main_port(self) -> int:
        """MASTER_PORT, else a port derived from the job's number; exported."""
        return self._main_port

    @staticmethod
    def detect(variables: Mapping[str, str] | None = None) -> bool:
        """Return whether jsrun started this process."""
        return set(os.environ if variables is None else variables) >= _NEEDED

    def node_rank(self) -> int:
        """Return the index of this host among the hosts of the job."""
        return self._node_rank

    def num_local_processes(self) -> int | None:
        """Return JSM_NAMESPACE_LOCAL_SIZE; None if it is not set."""
        return self._number("JSM_NAMESPACE_LOCAL_SIZE") if "JSM_NAMESPACE_LOCAL_SIZE" in self.variables else None

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Compare devices times nodes with the number of processes.

        Raises:
            ConfigError: They differ.
        """
        check_numbers(
            ("devices", num_devices, "the number of processes on this host", self.num_local_processes()),
            ("devices * num_nodes", num_devices * num_nodes, "JSM_NAMESPACE_SIZE", self.world_size()),
            fix=f"pass devices= and num_nodes= whose product is {self.world_size()}, or change the number of "
            f"processes: jsrun --nrs {num_nodes} --tasks_per_rs {num_devices}.",
        )


def _read_hosts(path: str) -> list[str]:
    """Return the hosts of the file without duplicates, except its first line, the launch host."""
    try:
        with open(path, encoding="utf-8") as file:
            lines = file.read().split()
    except OSError as error:
        raise LaunchError(
            f"LSB_DJOB_RANKFILE={path!r} cannot be read: {error}.",
            fix="run within an LSF job (bsub), on a host that has access to the file.",
        ) from error
    hosts = list(dict.fromkeys(lines[1:]))
    if not hosts:
        raise LaunchError(
            f"Expected at least one host after the launch host in LSB_DJOB_RANKFILE={path!r}, got none.",
            fix="request at least one compute host from LSF (bsub -nnodes).",
        )
    return hosts


def _place(host: str, hosts: list[str]) -> int:
    """Return the host's index. Hosts are compared with and without their domains."""
    for names, name in ((hosts, host), ([other.split(".")[0] for other in hosts], host.split(".")[0])):
        if name in names:
            return names.index(name)
    raise LaunchError(
        f"Expected this host to be one of the job's hosts ({', '.join(hosts)}), got {host!r}.",
        fix="start the program with jsrun, so that it runs on the hosts of the job.",
    )
