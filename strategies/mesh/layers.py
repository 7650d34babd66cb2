"""`MeshLayers`: how the layers of a module are sharded, and split over the axes tp and ep of a mesh."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn

from ..fsdp.root import root_of
from .processes import MeshProcesses

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from ...protocols import StepFunction
    from ..fsdp.root import ShardedRoot
    from ..fsdp.sharding import ShardingTarget
    from .axes import MeshAxes
    from .tensor import TensorPlan

__all__ = ["MeshLayers"]

logger = logging.getLogger(__name__)

# Any in this file: arguments of FSDPStrategy.


class MeshLayers(MeshProcesses):
    """What `MeshStrategy` does with the layers that one rank has, or has a part of.

    Args:
        axes: Sizes of the axes.
        tensor_plan: See `MeshStrategy`.
        sequence_parallel: See there.
        loss_parallel: See there.
        verify: See there.
        fsdp_arguments: Arguments of FSDPStrategy.
    """

    def __init__(
        self,
        axes: MeshAxes,
        *,
        tensor_plan: object,
        sequence_parallel: bool,
        loss_parallel: bool,
        verify: bool,
        **fsdp_arguments: Any,
    ) -> None:
        super().__init__(axes, **fsdp_arguments)
        self.tensor_plan = tensor_plan
        self.sequence_parallel = sequence_parallel
        self.loss_parallel = loss_parallel
        self.verify = verify
        self._lw_is_to_verify = verify
        self._lw_tensor_plan: TensorPlan | None = None  # of the module that is being sharded

    def _lw_meshes_of_units(self, module: nn.Module) -> dict[nn.Module, DeviceMesh]:
        mesh = self.groups.expert_shards
        if mesh is None:
            return {}
        from .experts.sharding import experts_in

        layers = (one.experts for one in experts_in(module).values())
        return {one: mesh for one in layers if any(True for _ in one.parameters())}  # not those of other stages

    def _lw_sharding_target(self) -> ShardingTarget:
        from ..fsdp.sharding import ShardingTarget

        plan, groups = self.plan, self.groups
        # Where nothing is to be gathered or averaged, what fully_shard does besides may still be wanted.
        is_sharded = (
            self.resolved_axes.reduce_size > 1
            or plan.offload
            or plan.mixed_precision is not None
            or self.accumulate_dtype is not None
        )
        return ShardingTarget(
            groups.shards, self.device, groups.reduce, groups.stage, is_sharded=is_sharded, seeds_by_name=True
        )

    @property
    def _lw_reduce_group(self) -> ProcessGroup | None:
        return self.groups.reduce

    @property
    def _lw_source_group(self) -> ProcessGroup | None:
        return self.groups.stage

    # -- tensor parallel layers ------------------------------------------------------------------------------------

    def _lw_shard(self, module: nn.Module) -> ShardedRoot:
        self._lw_tensor_plan = None
        root = super()._lw_shard(module)
        root.tensor_plan, self._lw_tensor_plan = self._lw_tensor_plan, None
        if root.tensor_plan is not None:
            root.tensor_plan.finish(module)
        return root

    def _lw_begin_splitting(self, module: nn.Module) -> Callable[[list[nn.Module]], None] | None:
        """Return what splits the layers of a unit over the axis tp; None where it has one process."""
        size = self.resolved_axes.tp
        if size == 1:
            return None
        from .tensor import resolve_plan

        plan = self._lw_tensor_plan = resolve_plan(module, self.tensor_plan, tp=size, **self._lw_in_parts)
        if self.is_global_zero:
            logger.info("%s", plan)
            for note in plan.notes:
                logger.warning("%s", note)
        return lambda modules: plan.apply(modules, module, self.groups.tensor)

    @property
    def _lw_in_parts(self) -> dict[str, bool]:
        return {"sequence_parallel": self.sequence_parallel, "loss_parallel": self.loss_parallel}

    def _lw_split_step(self, step: StepFunction, original: nn.Module, name: str) -> StepFunction:
        root = root_of(original)
        plan = None if root is None else root.tensor_plan
        if plan is None or name == "forward":
            return step
        from .steps import split_step, verified_step

        step = split_step(plan, original, step)
        # With stages no rank runs all layers in one step.
        is_whole = name == "training_step" and not self.has_stages
        return verified_step(plan, original, step, self._lw_take_verification) if is_whole else step

    def _lw_take_verification(self) -> bool:
        """Return whether the split layers are to be compared now: once, in the first batch of a first run."""
        is_due, self._lw_is_to_verify = self._lw_is_to_verify, False
        return is_due
