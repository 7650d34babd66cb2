"""The base of strategies with several processes. Later strategies derive from it; fabric/resolve.py asks for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from .base import ALONE, CPU, Strategy, Topology

if TYPE_CHECKING:
    from ..accelerators import Accelerator
    from ..precision import Precision

__all__ = ["ParallelStrategy"]


class ParallelStrategy(Strategy):
    """Several processes, one device each: the base of strategies that communicate.

    Args:
        accelerator: The kind of device; None lets Fabric choose.
        parallel_devices: The devices of this node's processes; None lets Fabric choose.
        cluster_environment: Knows ranks and addresses; None lets Fabric choose.
        checkpoint_io: Reads and writes checkpoints; None lets Fabric choose.
        precision_plugin: The precision; None lets Fabric choose.
        precision: Another name for `precision_plugin`.
    """

    def __init__(
        self,
        accelerator: Accelerator | None = None,
        parallel_devices: Sequence[torch.device] | None = None,
        cluster_environment: Any = None,  # Any: a ClusterEnvironment, whose package lies above this one
        checkpoint_io: Any = None,  # Any: see Strategy
        precision_plugin: Precision | None = None,
        *,
        precision: Precision | None = None,
    ) -> None:
        super().__init__(accelerator, checkpoint_io, precision_plugin, precision=precision)
        self.parallel_devices = None if parallel_devices is None else list(parallel_devices)
        self.cluster_environment = cluster_environment

    @property
    def topology(self) -> Topology:
        """Ranks and sizes, as the cluster environment knows them; one process without one."""
        cluster = self.cluster_environment or self._filled.get("cluster_environment")
        if cluster is None:
            return ALONE
        rank, size = cluster.global_rank(), cluster.world_size()
        return Topology(rank, cluster.local_rank(), cluster.node_rank(), size, rank, size)

    @property
    def device(self) -> torch.device:
        """The device of this process: that of its local rank."""
        if self._device is not None:
            return self._device
        devices = self.parallel_devices or self._filled.get("parallel_devices")
        return devices[self.topology.local_rank] if devices else CPU

    @device.setter
    def device(self, device: torch.device) -> None:
        self._device = device

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        """`num_replicas` and `rank` for a sampler."""
        topology = self.topology
        return {"num_replicas": topology.data_size, "rank": topology.data_rank}
