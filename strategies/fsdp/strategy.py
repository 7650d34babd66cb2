"""Fully sharded training: every process holds a shard of each parameter, its gradient and its optimizer state.

The engine is torch's `fully_shard`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ..distributed.collectives import all_reduce, host_device
from ..mesh.axes import REST, MeshAxes
from ..mesh.groups import MeshGroups
from ..parallel import DEFAULT_TIMEOUT
from ..sharded import ShardedStrategy
from ..traits import MemoryShares
from .plan import check_mesh

if TYPE_CHECKING:
    import torch
    from torch import nn

    from ...accelerators import Accelerator
    from ...precision import Precision
    from ...protocols import CheckpointPlugin, Cluster
    from .sharding import ShardingTarget

# Any in this file: what users give for torch's own types.


class FSDPStrategy(ShardedStrategy):
    """Fully sharded training: several processes share one sharded copy of the model, on any kind of device.

    The parameters of a unit of the model (such as a block) are gathered before it runs and freed afterwards. After the
    backward pass, each process has its shard of the averaged gradients, and the optimizer steps that shard. It is for
    models and optimizers that do not fit one device, and saves memory with smaller ones.

    Args:
        cpu_offload: Whether parameters, gradients and optimizer state are in host memory: True, False, or torch's
            CPUOffload or CPUOffloadPolicy.
        mixed_precision: torch's MixedPrecision or MixedPrecisionPolicy; replaces the dtypes of `precision=`.
        auto_wrap_policy: Modules that are separate units: a set of classes (or of their names), a function of a module,
            or one of torch's policies. None selects repeated blocks and very large modules.
        activation_checkpointing: Modules whose activations are recomputed in the backward pass: True for all units, the
            fraction of units that store theirs (0.5), classes, or a function of a module.
        activation_checkpointing_policy: Another name for `activation_checkpointing`.
        sharding_strategy: "FULL_SHARD"; "SHARD_GRAD_OP" keeps parameters gathered between forward and backward pass;
            "HYBRID_SHARD" shards within a group and has copies over the groups (by default a node is a group);
            "NO_SHARD" has a copy on every process.
        state_dict_type: "full": one file, written by rank 0; "sharded": a folder, written by all ranks. None: "full" in
            the Trainer, "sharded" in `Fabric.save`. Both load everywhere.
        device_mesh: (copies, shards) for "HYBRID_SHARD", or a DeviceMesh.
        backward_prefetch: Accepted for compatibility; the next unit is always gathered during the backward pass of the
            current one.
        forward_prefetch: Whether the host requests the next unit of the forward pass ahead of time.
        limit_all_gathers: Accepted for compatibility; gathers are always limited.
        use_orig_params: Accepted for compatibility; optimizers always get the user's parameters.
        param_init_fn: Function that initializes the parameters of a module that was built on the meta device.
        sync_module_states: Whether all ranks start with rank 0's values; None is True.
        uneven: Behavior if ranks have different numbers of training batches: "stop_all" ends the epoch on all ranks,
            "cycle" restarts the shorter loaders.
        kwargs: Further arguments of torch's fully_shard and FullyShardedDataParallel: ignored_modules, ...

    Raises:
        ConfigError: An argument is unknown or unsupported; every problem is named.
    """

    strategy_name = "fsdp"

    def __init__(
        self,
        accelerator: Accelerator | None = None,
        parallel_devices: Sequence[torch.device] | None = None,
        cluster_environment: Cluster | None = None,
        checkpoint_io: CheckpointPlugin | None = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | float | None = DEFAULT_TIMEOUT,
        cpu_offload: Any = None,
        mixed_precision: Any = None,
        auto_wrap_policy: Any = None,
        activation_checkpointing: Any = None,
        activation_checkpointing_policy: Any = None,
        sharding_strategy: Any = "FULL_SHARD",
        state_dict_type: Any = None,
        device_mesh: tuple[int, int] | DeviceMesh | None = None,
        backward_prefetch: Any = None,
        forward_prefetch: bool = False,
        limit_all_gathers: bool = True,
        use_orig_params: bool = True,
        param_init_fn: Callable[[nn.Module], None] | None = None,
        sync_module_states: bool | None = None,
        *,
        precision: Precision | None = None,
        start_method: str = "popen",
        uneven: str = "stop_all",
        stall_timeout: timedelta | float | None = None,
        **kwargs: Any,
    ) -> None:
        arguments = dict(
            accelerator=accelerator, parallel_devices=parallel_devices, cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io, precision_plugin=precision_plugin, process_group_backend=process_group_backend,
            timeout=timeout, start_method=start_method, precision=precision, uneven=uneven, stall_timeout=stall_timeout,
            cpu_offload=cpu_offload, mixed_precision=mixed_precision, auto_wrap_policy=auto_wrap_policy,
            activation_checkpointing=activation_checkpointing,
            activation_checkpointing_policy=activation_checkpointing_policy, sharding_strategy=sharding_strategy,
            state_dict_type=state_dict_type, device_mesh=device_mesh, backward_prefetch=backward_prefetch,
            forward_prefetch=forward_prefetch, limit_all_gathers=limit_all_gathers, use_orig_params=use_orig_params,
            param_init_fn=param_init_fn, sync_module_states=sync_module_states, **kwargs,
        )  # fmt: skip
        super().__init__(MeshAxes(fsdp=REST), arguments)
        has_copies = self.plan.mesh is not None or self.plan.is_hybrid or self.plan.is_replicated
        self.traits = replace(self.traits, sums_in_tree=not has_copies)

    def memory_shares(self, num_processes: int, num_nodes: int) -> MemoryShares:
        """Return how a copy is sharded; see `SharesMemory.memory_shares`."""
        sizes = check_mesh(self.plan, num_processes, num_nodes)
        shards = num_processes if sizes is None else sizes[1]
        is_held = self.plan.reshard_after_forward is False  # from the first forward to the end of the backward pass
        formula = "16 P / N" if shards > 1 else "16 P"
        return MemoryShares(1 if is_held else shards, shards, shards, casts_parameters=True, formula=formula)

    def _lw_make_groups(self) -> MeshGroups:
        """Return the processes as one axis, "shard", or two, "replicate" and "shard"."""
        size, kind = self.world_size, self.device.type
        last = all_reduce(self.topology.node_rank, group=None, reduce_op="max", device=host_device(self.device))
        num_nodes = 1 + int(last)
        sizes = check_mesh(self.plan, size, num_nodes)
        if isinstance(self.plan.mesh, DeviceMesh):
            return MeshGroups(self.plan.mesh)
        if sizes is None:
            return MeshGroups(init_device_mesh(kind, (size,), mesh_dim_names=("shard",)))
        return MeshGroups(init_device_mesh(kind, sizes, mesh_dim_names=("replicate", "shard")))

    def _lw_target(self) -> ShardingTarget:
        return replace(super()._lw_target(), is_sharded=True, seeds_by_name=False)
