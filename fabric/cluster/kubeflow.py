"""Pods of a Kubeflow PyTorchJob (or any Kubernetes job that sets the same variables), one process in each."""

from __future__ import annotations

import os
from collections.abc import Mapping

from .base import StartedProcesses, check_numbers


class KubeflowEnvironment(StartedProcesses):
    """One process per pod: MASTER_ADDR, MASTER_PORT, WORLD_SIZE and RANK define everything.

    A job that has torchrun in its command is a TorchElasticEnvironment; one that sets NODE_RANK lets Loopwright start
    the processes of each pod (LightningEnvironment).
    """

    @property
    def main_address(self) -> str:
        """MASTER_ADDR."""
        return self._text("MASTER_ADDR")

    @property
    def main_port(self) -> int:
        """MASTER_PORT."""
        return self._port(self._number("MASTER_PORT"))

    @staticmethod
    def detect(variables: Mapping[str, str] | None = None) -> bool:
        """Return whether this is a pod with a rank that does not start further processes."""
        variables = os.environ if variables is None else variables
        needed = {"KUBERNETES_SERVICE_HOST", "MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK"}
        return needed <= set(variables) and not {"LOCAL_RANK", "NODE_RANK", "GROUP_RANK"} & set(variables)

    def local_rank(self) -> int:
        """Return 0: a pod has one process."""
        return 0

    def node_rank(self) -> int:
        """Return RANK: each pod runs one process."""
        return self.global_rank()

    def num_local_processes(self) -> int:
        """Return 1."""
        return 1

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Compare devices with 1 and nodes with the number of pods.

        Raises:
            ConfigError: They differ.
        """
        check_numbers(
            ("devices", num_devices, "the number of processes in a pod", 1),
            ("num_nodes", num_nodes, "WORLD_SIZE, the number of pods,", self.world_size()),
            fix=f"pass devices=1 and num_nodes={self.world_size()}; for several processes per pod, run `loopwright "
            "launch` or torchrun in each pod, or set NODE_RANK to the pod's number.",
        )
