"""The meshes and process groups in which sharded strategies communicate, made from sizes of axes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from .axes import AXES

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from .axes import MeshAxes


@dataclass(frozen=True, slots=True)
class MeshGroups:
    """Meshes and groups of this process. A group is None where it has all processes.

    Attributes:
        shards: What `fully_shard` takes: copies over the first axis where there are several, shards over the last.
        full: All axes, including axes of size 1; None if there are only copies and shards, without names of axes.
        tensor: The tensor parallel axis alone, of the same root mesh as `shards`; None without `full`.
        data: The ranks with this one's coordinates on pp, cp and tp: each reads other data.
        reduce: The ranks with this one's coordinates on pp and tp: a gradient is averaged over them.
        stage: The ranks with this one's coordinate on pp: they have the same layers.
        same_batch: The ranks that differ on cp and tp only. Made where both have several; None elsewhere.
        pipeline: The ranks that have the other stages of this one's pipeline.
        experts: The ranks that share the experts of a layer: `ep` neighbors on the fsdp axis.
        expert_shards: What `fully_shard` takes for these experts: copies as in `shards`, and shards over the rest of
            the fsdp axis; of the same root mesh as `experts`.
    """

    shards: DeviceMesh
    full: DeviceMesh | None = None
    tensor: DeviceMesh | None = None
    data: ProcessGroup | None = None
    reduce: ProcessGroup | None = None
    stage: ProcessGroup | None = None
    same_batch: ProcessGroup | None = None
    pipeline: ProcessGroup | None = None
    experts: DeviceMesh | None = None
    expert_shards: DeviceMesh | None = None


def make_groups(kind: str, axes: MeshAxes, names: Mapping[str, str]) -> MeshGroups:
    """Return the meshes and groups of this process. On every rank: it communicates.

    Args:
        kind: Type of the devices, such as "cuda".
        axes: Sizes, without -1; their product is the number of processes.
        names: Names of the axes in `full`, by those of `AXES`, in their order; one that is left out has size 1.
    """
    sizes = {axis: size for axis, size in zip(AXES, axes.sizes, strict=True) if axis in names}
    full = root = init_device_mesh(kind, tuple(sizes.values()), mesh_dim_names=tuple(names.values()))
    if axes.cp > 1:  # fully_shard and the tensor parallel axis need one root mesh
        sizes["fsdp"] *= sizes.pop("cp")
        root = init_device_mesh(kind, tuple(sizes.values()), mesh_dim_names=tuple(names[axis] for axis in sizes))
    over = (names["dp"], names["fsdp"]) if axes.dp > 1 else names["fsdp"]
    copies = axes.pp * axes.cp * axes.tp
    both = axes.cp * axes.tp if axes.cp > 1 < axes.tp else 1
    # Only made where there are experts to share: each takes process groups of its own.
    experts = None if axes.ep == 1 else _expert_mesh(kind, axes, names)
    return MeshGroups(
        shards=root[over],
        full=full,
        tensor=root[names["tp"]],
        data=None if copies == 1 else _middle(kind, axes.pp, axes.data_size, axes.cp * axes.tp),
        reduce=None if axes.pp * axes.tp == 1 else _middle(kind, axes.pp, axes.reduce_size, axes.tp),
        experts=experts and experts["ep"],
        expert_shards=experts and experts[over],
        pipeline=None if axes.pp == 1 else full[names["pp"]].get_group(),
        stage=None if axes.pp == 1 else _middle(kind, axes.pp, axes.world_size // axes.pp, 1),
        same_batch=None if both == 1 else _middle(kind, axes.world_size // both, both, 1),
    )


def _middle(kind: str, outer: int, size: int, inner: int) -> ProcessGroup:
    """Return this rank's group along the middle one of three axes."""
    mesh = init_device_mesh(kind, (outer, size, inner), mesh_dim_names=("outer", "group", "inner"))
    return mesh["group"].get_group()


def _expert_mesh(kind: str, axes: MeshAxes, names: Mapping[str, str]) -> DeviceMesh:
    """Return the axes pp, dp, what `ep` leaves of fsdp with cp, ep, tp."""
    rest = axes.fsdp // axes.ep
    ranks = torch.arange(axes.world_size).view(axes.pp, axes.dp, rest, axes.ep, axes.cp, axes.tp)
    ranks = ranks.transpose(3, 4).reshape(axes.pp, axes.dp, rest * axes.cp, axes.ep, axes.tp)
    return DeviceMesh(kind, ranks, mesh_dim_names=(*(names[axis] for axis in ("pp", "dp", "fsdp")), "ep", names["tp"]))
