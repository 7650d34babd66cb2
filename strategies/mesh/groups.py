"""The meshes and process groups that `MeshStrategy` communicates in, made from sizes of axes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from .axes import AXES

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from .axes import MeshAxes

__all__ = ["MeshGroups"]


class MeshGroups:
    """Meshes and groups of this process. Made on every rank: it communicates.

    A group is None where it has all processes.

    Args:
        kind: Type of the devices, such as "cuda".
        axes: Sizes, without -1; their product is the number of processes.
        names: Names of the axes in `full`, by those of `AXES`, in their order; one that is left out has size 1.

    Attributes:
        full: All axes, also those of size 1.
        shards: What `fully_shard` takes: copies over the first axis where there are several, shards over the last.
        tensor: The tensor parallel axis alone, of the same root mesh as `shards`.
        data: The ranks with this one's coordinates on pp, cp and tp: each reads other data.
        reduce: The ranks with this one's coordinates on pp and tp: a gradient is averaged over them.
        stage: The ranks with this one's coordinate on pp: they have the same layers.
        same_batch: The ranks that differ on cp and tp only. Made where both have several; None elsewhere.
        pipeline: The ranks that have the other stages of this one's pipeline.
        experts: The ranks that share the experts of a layer: `ep` neighbors on the fsdp axis.
        expert_shards: What `fully_shard` takes for these experts: copies as in `shards`, and shards over the rest of
            the fsdp axis; of the same root mesh as `experts`.
    """

    def __init__(self, kind: str, axes: MeshAxes, names: Mapping[str, str]) -> None:
        sizes = {axis: size for axis, size in zip(AXES, axes.sizes, strict=True) if axis in names}
        self.full = init_device_mesh(kind, tuple(sizes.values()), mesh_dim_names=tuple(names.values()))
        root = self.full
        if axes.cp > 1:  # fully_shard and the tensor parallel axis need one root mesh
            sizes["fsdp"] *= sizes.pop("cp")
            root = init_device_mesh(kind, tuple(sizes.values()), mesh_dim_names=tuple(names[axis] for axis in sizes))
        over = (names["dp"], names["fsdp"]) if axes.dp > 1 else names["fsdp"]
        self.shards: DeviceMesh = root[over]
        self.tensor: DeviceMesh = root[names["tp"]]
        copies = axes.pp * axes.cp * axes.tp
        self.data = None if copies == 1 else _middle(kind, axes.pp, axes.data_size, axes.cp * axes.tp)
        is_whole = axes.pp * axes.tp == 1
        self.reduce = None if is_whole else _middle(kind, axes.pp, axes.reduce_size, axes.tp)
        # Only made where there are experts to share: each takes process groups of its own.
        experts = None if axes.ep == 1 else _expert_mesh(kind, axes, names)
        self.experts: DeviceMesh | None = experts and experts["ep"]
        self.expert_shards: DeviceMesh | None = experts and experts[over]
        self.pipeline: ProcessGroup | None = None if axes.pp == 1 else self.full[names["pp"]].get_group()
        self.stage = None if axes.pp == 1 else _middle(kind, axes.pp, axes.world_size // axes.pp, 1)
        both = axes.cp * axes.tp if axes.cp > 1 < axes.tp else 1
        self.same_batch = None if both == 1 else _middle(kind, axes.world_size // both, both, 1)


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
