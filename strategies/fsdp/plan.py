"""`ShardingPlan`: how a module is to be sharded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ...errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# Any in this file: torch's policies, which have no common type.


@dataclass(frozen=True)
class MixedPrecisionPlan:
    """Dtypes that the user requested instead of those that follow from `precision=`; None leaves them as they are.

    Attributes:
        param_dtype: Of parameters in the forward and backward pass, and of gathering them.
        reduce_dtype: Of gradients while they are averaged; None is `param_dtype`.
        buffer_dtype: Of floating point buffers; fully_shard casts none.
        output_dtype: What floating point outputs of every unit are cast to.
        cast_forward_inputs: Whether inputs of every unit are cast to `param_dtype`.
        cast_root_forward_inputs: Whether inputs of the root module are.
        keep_low_precision_grads: Whether gradients were to stay in `reduce_dtype`; fully_shard casts them to the
            parameters' dtype.
        full_precision_classes: Modules to which this does not apply if they are separate units.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    cast_root_forward_inputs: bool = True
    keep_low_precision_grads: bool = False
    full_precision_classes: tuple[type[nn.Module], ...] = ()


@dataclass(frozen=True)
class ShardingPlan:
    """How a module is to be sharded.

    Attributes:
        reshard_after_forward: Whether a unit's parameters are resharded between forward and backward pass; a number
            for resharding over that many processes.
        is_hybrid: Whether there are copies that are sharded in turn.
        is_replicated: Whether every process has a copy.
        mesh: Sizes (copies, shards), or a mesh that the user made. None: all processes, by `check_mesh`.
        offload: Whether parameters, gradients and optimizer state live in the host's memory.
        pin_memory: Whether that memory is pinned. None: where there is an accelerator.
        mixed_precision: The plan from the user's arguments; None: what follows from `precision=`.
        casts_when_gathered: Whether `precision=` casts parameters when they are gathered, so that autocast makes no
            copies of them; None: not on the CPU, where autocast leaves norms alone, which refuse half weights with
            float32 inputs.
        accumulate_dtype: Of sums of gradients over a window and over ranks; None: what follows from these.
        auto_wrap_policy: See `choose_units`.
        activation_checkpointing: See `apply_activation_checkpointing`; None: none.
        backward_prefetch: How many units before the present one to gather ahead in the backward pass; 0: torch's way,
            which is the one that comes next.
        forward_prefetch: How many units after the present one to gather ahead in the forward pass; 0: torch's way,
            which gathers ahead on the device, but not on the CPU's side.
        sync_module_states: Whether all ranks begin with rank 0's values.
        param_init_fn: Fills a module that was built on the meta device; None: the module's own way.
        ignored: Modules and parameters that are not sharded.
        shard_placement_fn: Chooses the dimension along which a parameter is sharded; None: the first one.
        state_dict_type: "full" or "sharded"; None: the caller that saves decides.
        notes: Accepted arguments without effect, or with another one than in FullyShardedDataParallel; as sentences.
    """

    reshard_after_forward: bool | int = True
    is_hybrid: bool = False
    is_replicated: bool = False
    mesh: tuple[int, int] | DeviceMesh | None = None
    offload: bool = False
    pin_memory: bool | None = None
    mixed_precision: MixedPrecisionPlan | None = None
    casts_when_gathered: bool | None = None
    accumulate_dtype: torch.dtype | None = None
    auto_wrap_policy: Any = None
    activation_checkpointing: Any = None
    backward_prefetch: int = 0
    forward_prefetch: int = 0
    sync_module_states: bool = True
    param_init_fn: Callable[[nn.Module], None] | None = None
    ignored: tuple[nn.Module | nn.Parameter, ...] = ()
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None
    state_dict_type: str | None = None
    notes: tuple[str, ...] = ()

    def find_ignored(self, module: nn.Module) -> set[nn.Parameter]:
        """Return the parameters of a module that are not sharded."""
        found: set[nn.Parameter] = set()
        for one in self.ignored:
            found.update(one.parameters() if isinstance(one, nn.Module) else [one])
        return found.intersection(module.parameters())


def check_mesh(plan: ShardingPlan, world_size: int, num_nodes: int = 1) -> tuple[int, int] | None:
    """Return how many copies there are and over how many processes each is sharded; None: one copy, over all.

    Args:
        plan: The plan from the user's arguments.
        world_size: Number of processes.
        num_nodes: Number of machines; without a mesh, "HYBRID_SHARD" has one copy on each.

    Raises:
        ConfigError: There are not as many processes as the mesh has entries, or they are not divisible as requested.
    """
    if plan.is_replicated and plan.mesh is None:
        copies, shards = world_size, 1
    elif plan.mesh is None:
        copies = num_nodes if plan.is_hybrid else 1
        shards = world_size // copies
    else:
        copies, shards = sizes_of(plan.mesh)
    if copies * shards != world_size and plan.mesh is None:
        raise ConfigError(
            f"Expected the number of processes to be a multiple of {num_nodes} nodes for "
            f"sharding_strategy='HYBRID_SHARD', got {world_size} processes.",
            fix="run the same number of processes on each node.",
        )
    if copies * shards != world_size:
        raise ConfigError(
            f"Expected device_mesh= for {world_size} processes, got {copies} x {shards} = {copies * shards}.",
            fix="pass sizes (copies, shards) whose product is the number of processes.",
        )
    size = plan.reshard_after_forward
    if not isinstance(size, bool) and shards % size != 0:
        raise ConfigError(
            f"Expected reshard_after_forward to divide the {shards} processes of a copy, got "
            f"reshard_after_forward={size}.",
            fix="pass True, False, or a divisor of that number.",
        )
    return None if copies == 1 else (copies, shards)


def sizes_of(mesh: tuple[int, int] | DeviceMesh) -> tuple[int, int]:
    """Return how many copies a mesh has, and over how many processes each is sharded."""
    shape = mesh if isinstance(mesh, tuple) else tuple(mesh.shape)
    return (shape[0], shape[1]) if len(shape) == 2 else (1, shape[0])
