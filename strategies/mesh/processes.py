"""`MeshProcesses`: what a strategy knows of processes that form a mesh, and the collectives along its axes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist
from torch import Tensor

from ..base import Topology
from ..fsdp.strategy import FSDPStrategy
from .axes import AXES, MeshAxes
from .groups import MeshGroups

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["MeshProcesses"]

T = TypeVar("T")

# Any in this file: structures of tensors and numbers, and arguments of FSDPStrategy.


class MeshProcesses(FSDPStrategy):
    """The processes of `MeshStrategy`, which adds what runs on them.

    Args:
        axes: Sizes of the axes.
        fsdp_arguments: Arguments of FSDPStrategy.
    """

    copies_draw_alike = True
    axis_names: Mapping[str, str] = {axis: axis for axis in AXES}
    """Names of the axes in `device_mesh`, by those of `AXES`."""
    logs_parts = False
    """Whether the ranks that share sequences log values of their parts."""

    def __init__(self, axes: MeshAxes, **fsdp_arguments: Any) -> None:
        self.axes = axes
        self._lw_groups: MeshGroups | None = None
        self._lw_resolved: tuple[int, MeshAxes, MeshAxes] | None = None  # number of processes, axes, and these resolved
        super().__init__(**fsdp_arguments)

    @property
    def last_stage_rank(self) -> int:
        """The place in a pipeline of the rank with the last stage."""
        return 0

    @property
    def topology(self) -> Topology:
        """Ranks and sizes; `data_rank` is the position on the axes dp and fsdp."""
        if self._lw_topology is not None:
            return self._lw_topology
        found = super().topology
        if found.world_size == 1 and not self.is_connected:  # not launched yet
            return found
        axes, rank = self.axes.resolve(found.world_size), found.global_rank  # resolved_axes asks for the topology
        stage = axes.coordinates(rank)["pp"]
        return replace(found, data_rank=axes.data_rank(rank), data_size=axes.data_size, stage=stage)

    @property
    def reporting_ranks(self) -> list[int] | None:  # type: ignore[override]  # it follows from the axes
        """For each share of the data the first of the ranks with the last stage, which has the loss; None: all."""
        axes = self.resolved_axes
        return None if axes.pp * axes.cp * axes.tp == 1 else self._lw_of_last_stage(axes.cp * axes.tp)

    @property
    def batch_norm_group(self) -> ProcessGroup | None:  # type: ignore[override]  # it follows from the axes
        """The ranks over which batch norms are synchronized: those with the same layers that read different data."""
        return self.groups.reduce if self.is_connected else None

    def _lw_of_last_stage(self, step: int) -> list[int]:
        """Return each `step`-th of the ranks with the last stage."""
        size = self.world_size // self.resolved_axes.pp  # of a stage
        first = self.last_stage_rank * size
        return list(range(first, first + size, step))

    @property
    def resolved_axes(self) -> MeshAxes:
        """The sizes of the axes for the number of processes, without -1."""
        size, known = self.world_size, self._lw_resolved
        if known is None or known[0] != size or known[1] is not self.axes:  # asked several times in a step
            known = self._lw_resolved = (size, self.axes, self.axes.resolve(size))
        return known[2]

    @property
    def has_stages(self) -> bool:  # type: ignore[override]  # it is not set, but follows from the axes
        """Whether ranks hold different layers."""
        return (self.resolved_axes if self.is_connected else self.axes).pp != 1

    @property
    def groups(self) -> MeshGroups:
        """The meshes and process groups. On every rank: the first access communicates."""
        if self._lw_groups is None:
            self._lw_groups = MeshGroups(self.device.type, self.resolved_axes, self.axis_names)
        return self._lw_groups

    @property
    def device_mesh(self) -> DeviceMesh | None:  # type: ignore[override]  # it is not set, but follows from the axes
        """The processes as a mesh with all axes, also those of size 1: `device_mesh["tp"]` is one of them.

        None before the processes are connected.
        """
        return self.groups.full if self.is_connected else None

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh over which parameters are sharded: the axes dp, where there are copies, and fsdp with cp."""
        return self.groups.shards

    @property
    def _lw_layout(self) -> Mapping[str, int]:
        axes = self.resolved_axes
        sizes = {"pp": axes.pp, "tp": axes.tp, "ep": axes.ep}
        return {axis: size for axis, size in sizes.items() if size > 1}

    def setup_environment(self) -> None:
        """Connect the processes and make their groups. Called once in every process."""
        super().setup_environment()
        if self.is_connected:
            self._lw_groups = None
            self.groups  # noqa: B018  # here, where all ranks are: a first collective may be that of a few
            # torch (2.13) asks the ranks of the first gradient only, which may be the same on all ranks of an axis.
            self.precision.reduce_overflow = self._lw_largest_on_all_ranks

    def teardown(self) -> None:
        """Release devices and connections after a run."""
        self.precision.reduce_overflow = None
        super().teardown()
        self._lw_groups = None

    # -- collectives over the ranks that read different data -------------------------------------------------------

    def gather_logged(self, obj: T) -> list[T]:
        """Return the objects of the ranks whose logged values count; see `Strategy.gather_logged`."""
        if not self.logs_parts:
            return self.gather_reports(obj)
        everywhere = self.gather_objects(obj)
        return [everywhere[rank] for rank in self._lw_of_last_stage(self.resolved_axes.tp)]

    @property
    def logged_place(self) -> tuple[int, int]:
        """Which object of `gather_logged` is of this rank, and their number."""
        if not self.logs_parts:
            return self.report_place
        axes = self.resolved_axes
        size = self.world_size // axes.pp  # of a stage
        return self.global_rank % size // axes.tp, size // axes.tp

    def all_reduce(self, tensor: object, group: ProcessGroup | str | None = None, reduce_op: object = "mean") -> Any:
        """Return a tensor, number or structure, reduced over the ranks that read different data, or over `group`."""
        if isinstance(group, str):  # all_reduce(tensor, "sum")
            group, reduce_op = None, group
        return super().all_reduce(tensor, self._lw_data_group(group), reduce_op)

    reduce = all_reduce

    def reduce_scatter(
        self, tensor: object, group: ProcessGroup | str | None = None, reduce_op: object = "mean"
    ) -> Any:
        """Return this rank's chunk of a reduction over the ranks that read different data, or over `group`."""
        if isinstance(group, str):  # reduce_scatter(tensor, "sum")
            group, reduce_op = None, group
        return super().reduce_scatter(tensor, self._lw_data_group(group), reduce_op)

    def all_gather(self, tensor: object, group: ProcessGroup | bool | None = None, sync_grads: bool = False) -> Any:
        """Return tensors of the ranks that read different data, or of `group`, stacked along a new first dimension."""
        if isinstance(group, bool):  # all_gather(tensor, True)
            sync_grads, group = group, None
        return super().all_gather(tensor, self._lw_data_group(group), sync_grads)

    def start_sum(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Begin to add a tensor over the ranks that read different data; see `Strategy.start_sum`."""
        if not self.is_connected or self.resolved_axes.data_size == 1:
            return lambda: tensor
        work = dist.all_reduce(tensor, group=self.groups.data, async_op=True)

        def finish() -> Tensor:
            work.wait()
            return tensor

        return finish

    def _lw_largest_on_all_ranks(self, tensor: Tensor) -> None:
        dist.all_reduce(tensor, dist.ReduceOp.MAX)

    def _lw_data_group(self, group: ProcessGroup | None) -> ProcessGroup | None:
        if group is not None or not self.is_connected:
            return group
        return self.groups.reduce if self.logs_parts else self.groups.data
