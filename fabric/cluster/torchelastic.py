"""`TorchElasticEnvironment`: processes started by torchrun, `loopwright launch` or another elastic launcher."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping

from .base import StartedProcesses, check_numbers

log = logging.getLogger(__name__)


class TorchElasticEnvironment(StartedProcesses):
    """The variables of torchrun: WORLD_SIZE, RANK, LOCAL_RANK, GROUP_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and
    MASTER_PORT."""

    @property
    def name(self) -> str:
        """Name in messages."""
        return "torchrun"

    @property
    def main_address(self) -> str:
        """MASTER_ADDR, or the loopback address with a warning."""
        address = self.variables.get("MASTER_ADDR")
        if not address:
            log.warning("MASTER_ADDR is not set; 127.0.0.1 is used, which works only on a single machine")
        return address or "127.0.0.1"

    @property
    def main_port(self) -> int:
        """MASTER_PORT, or 12910 with a warning."""
        if "MASTER_PORT" not in self.variables:
            log.warning("MASTER_PORT is not set; 12910 is used")
        return self._port(12910)

    @staticmethod
    def detect(variables: Mapping[str, str] | None = None) -> bool:
        """Return whether torch's elastic launch started this process."""
        return "TORCHELASTIC_RUN_ID" in (os.environ if variables is None else variables)

    def node_rank(self) -> int:
        """Return GROUP_RANK, or 0."""
        return self._number("GROUP_RANK", 0)

    def num_local_processes(self) -> int | None:
        """Return LOCAL_WORLD_SIZE; None if it is not set."""
        return self._number("LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in self.variables else None

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Compare devices times nodes with the number of processes.

        Raises:
            ConfigError: They differ.
        """
        check_numbers(
            ("devices * num_nodes", num_devices * num_nodes, "WORLD_SIZE, as torchrun has set it,", self.world_size()),
            fix=f"pass devices='auto' and num_nodes={self._num_nodes(num_nodes)}, or start the number of processes "
            f"that the arguments request: torchrun --nnodes={num_nodes} --nproc-per-node={num_devices} "
            "(`loopwright launch` has the same options).",
        )

    def _num_nodes(self, asked: int) -> int:
        """Return the number of nodes that matches the existing processes, if this node can determine it."""
        local = self.num_local_processes()
        world = self.world_size()
        return world // local if local and world % local == 0 else asked
