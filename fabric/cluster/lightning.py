"""`LightningEnvironment`: processes started by Loopwright or manually, without a scheduler."""

from __future__ import annotations

import os
from collections.abc import Mapping

from ...errors import ConfigError
from ...sagemaker import sagemaker_variables
from .base import ClusterEnvironment

# Variables that contain the node rank; the last is set by DeepSpeed's launcher.
_NODE_RANKS = ("NODE_RANK", "GROUP_RANK", "CROSS_RANK")


class LightningEnvironment(ClusterEnvironment):
    """One machine, or several: the user starts the same command on each.

    On several machines the user sets MASTER_ADDR, MASTER_PORT and NODE_RANK (a SageMaker job needs none of them), and
    Loopwright starts the processes of each machine. With LOCAL_RANK set, the user starts every process.

    Args:
        variables: Environment variables; None for the current ones of this process.
    """

    def __init__(self, *, variables: Mapping[str, str] | None = None) -> None:
        super().__init__(variables=variables)
        self._world_size = 1
        self._global_rank = 0
        self._main_port: int | None = None

    @property
    def variables(self) -> Mapping[str, str]:
        """The environment variables that are read; in a SageMaker job, with those that follow from its own."""
        found = super().variables
        return {**sagemaker_variables(found), **found} if "SM_HOSTS" in found else found

    @property
    def name(self) -> str:
        """Name in messages."""
        return "the environment without a scheduler"

    @property
    def creates_processes_externally(self) -> bool:
        """Whether LOCAL_RANK is set: then this process is one of several already."""
        return "LOCAL_RANK" in self.variables

    @property
    def main_address(self) -> str:
        """MASTER_ADDR, or the loopback address."""
        return self.variables.get("MASTER_ADDR") or "127.0.0.1"

    @property
    def main_port(self) -> int:
        """The port that was set, else MASTER_PORT, else STANDALONE_PORT, else 0, in which case the launcher opens
        one."""
        if self._main_port is not None:
            return self._main_port
        return self._port(self._number("STANDALONE_PORT", 0))

    def set_main_port(self, port: int) -> None:
        """Set the port that the launcher opened."""
        self._main_port = port

    @staticmethod
    def detect() -> bool:
        """Return True: every process runs somewhere."""
        return True

    def world_size(self) -> int:
        """Return the number that was set; 1 by default."""
        return self._world_size

    def set_world_size(self, size: int) -> None:
        """Set the number of processes."""
        self._world_size = size

    def global_rank(self) -> int:
        """Return the rank that was set; 0 by default."""
        return self._global_rank

    def set_global_rank(self, rank: int) -> None:
        """Set the rank among all processes."""
        self._global_rank = rank

    def local_rank(self) -> int:
        """Return LOCAL_RANK, or 0."""
        return self._number("LOCAL_RANK", 0)

    def node_rank(self) -> int:
        """Return NODE_RANK, else GROUP_RANK, else CROSS_RANK, else 0."""
        name = next((one for one in _NODE_RANKS if one in self.variables), _NODE_RANKS[0])
        return self._number(name, 0)

    def num_local_processes(self) -> int | None:
        """Return LOCAL_WORLD_SIZE, or LOCAL_SIZE from DeepSpeed's launcher; None if neither is set."""
        if "LOCAL_WORLD_SIZE" not in self.variables and self._is_deepspeeds:
            return self._number("LOCAL_SIZE")
        return self._number("LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in self.variables else None

    @property
    def _is_deepspeeds(self) -> bool:
        """Whether DeepSpeed's launcher has started this process."""
        return {"LOCAL_RANK", "CROSS_SIZE", "LOCAL_SIZE"} <= set(self.variables)

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Check the variables that several nodes need, and compare ranks with sizes.

        Without NODE_RANK every node would assume rank 0, and all would wait for each other.

        Raises:
            ConfigError: A variable is missing or inconsistent.
        """
        if num_nodes > 1:
            missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not self.variables.get(name)]
            if self._main_port:
                missing = [name for name in missing if name != "MASTER_PORT"]
            if not set(_NODE_RANKS) & set(self.variables):
                missing.append("NODE_RANK")
            if missing:
                raise ConfigError(
                    f"Expected a scheduler or environment variables for num_nodes={num_nodes}, but {_listed(missing)} "
                    "not set.",
                    fix="on every node, set MASTER_ADDR and MASTER_PORT to those of the first node, and NODE_RANK to "
                    f"the node's number (0 to {num_nodes - 1}); or start with `loopwright launch --nnodes "
                    f"{num_nodes} --node-rank ... --main-address ... script.py`.",
                )
        if self._is_deepspeeds:
            # The run would wait for ranks that were not started.
            started = self._number("LOCAL_SIZE"), self._number("CROSS_SIZE")
            if started != (num_devices, num_nodes):
                raise ConfigError(
                    f"Expected devices={started[0]} and num_nodes={started[1]}, as started by the deepspeed launcher, "
                    f"got devices={num_devices} and num_nodes={num_nodes}.",
                    fix=f"pass devices={started[0]} and num_nodes={started[1]}, or start the launcher with --num_gpus "
                    f"{num_devices} and --num_nodes {num_nodes}.",
                )
        for name, rank, argument, size in (
            ("NODE_RANK", self.node_rank(), "num_nodes", num_nodes),
            ("LOCAL_RANK", self.local_rank(), "devices", num_devices),
        ):
            if rank >= size:
                raise ConfigError(
                    f"Expected {name} to be in the range 0 to {size - 1} with {argument}={size}, got {rank}.",
                    fix=f"pass a larger {argument}, or set {name} to a smaller number.",
                )

    def teardown(self) -> None:
        """Remove WORLD_SIZE in the process that started the others, which have ended."""
        super().teardown()
        if self._variables is None and not self.creates_processes_externally:
            os.environ.pop("WORLD_SIZE", None)


LocalEnvironment = LightningEnvironment
"""Former name."""


def _listed(names: list[str]) -> str:
    return f"{', '.join(names)} {'is' if len(names) == 1 else 'are'}"
