"""Data parallel training by XLA: one process, whose graphs run on all devices of a host (SPMD).

The program is that of one device with the full batch; tensors are marked with their sharding over the devices, and
XLA's compiler adds the communication.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from .process import XLAProcessStrategy

if TYPE_CHECKING:
    import torch

    from ...accelerators import Accelerator
    from ...precision import Precision
    from ...protocols import CheckpointPlugin, Cluster


class XLAStrategy(XLAProcessStrategy):
    """One process that trains on all XLA devices of this host, each with a copy of the module.

    A loader's `batch_size` counts the samples of all devices together; each device computes its shard, and gradients
    are those of the full batch, also with `lw.Loss(sum, weight)`. Batch norm sees the full batch. There is one rank, so
    collectives return their argument. Batches are sharded along their first dimension; a batch that does not divide is
    computed by every device, with the same result.

    Args:
        parallel_devices: The devices, all devices of the runtime; None is the devices of `devices=`.
        sync_module_states: Accepted; one process has one state, which every device gets.
        cluster_environment: Accepted as None only, because there is one process.

    Raises:
        ConfigError: `cluster_environment` was given.
    """

    strategy_name = "xla"
    traits = replace(XLAProcessStrategy.traits, has_several_devices=True)
    data_axis = "data"

    def __init__(
        self,
        accelerator: Accelerator | None = None,
        parallel_devices: Sequence[torch.device] | None = None,
        checkpoint_io: CheckpointPlugin | None = None,
        precision_plugin: Precision | None = None,
        debug: bool = False,
        sync_module_states: bool = True,
        *,
        cluster_environment: Cluster | None = None,
        precision: Precision | None = None,
    ) -> None:
        super().__init__(
            accelerator, checkpoint_io, precision_plugin, debug=debug, precision=precision,
            parallel_devices=parallel_devices, cluster_environment=cluster_environment,
        )  # fmt: skip
        self.sync_module_states = sync_module_states
