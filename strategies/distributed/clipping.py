"""Norms of tensors that are sharded over ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from .shards import is_sharded, local

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def total_norm(gradients: Sequence[Tensor], norm_type: float) -> Tensor:
    """Return the norm of all gradients as one vector. Call it on every rank: it communicates once per mesh axis.

    Args:
        gradients: Sharded gradients, or full gradients that are equal on all ranks; may be empty.
        norm_type: Order of the norm; may be infinity.

    Returns:
        Shape (), float32 or the gradients' wider dtype, on their device, equal on all ranks.

    Source: the p-th root of the sum of the shards' norms to the power p; for infinite order, the maximum.
    """
    is_max = math.isinf(norm_type)
    groups: dict[tuple[DeviceMesh | None, tuple[int, ...]], list[Tensor]] = {}
    for gradient in gradients:
        groups.setdefault(_where(gradient), []).append(gradient)
    totals = []
    for (mesh, axes), members in groups.items():
        total = _powered(members, norm_type)
        if mesh is not None:
            for axis in axes:
                total = _combined(total, mesh, axis, is_max=is_max)
        totals.append(total)
    if not totals:
        return torch.zeros(())
    device = totals[0].device
    stacked = torch.stack([total.to(device) for total in totals])
    return stacked.max() if is_max else stacked.sum() ** (1.0 / norm_type)


def over_shards(values: Tensor, tensors: Sequence[Tensor], *, is_max: bool) -> Tensor:
    """Return statistics of tensors, reduced over their shards. Call it on every rank: it communicates once per axis.

    Args:
        values: Shape (len(tensors), n): statistics of this rank's shards; for full tensors equal on all ranks.
        tensors: The sharded or full tensors that the rows of `values` describe.
        is_max: Whether to return the maximum, where NaN exceeds all numbers; otherwise the sum.
    """
    rows: dict[tuple[DeviceMesh | None, tuple[int, ...]], list[int]] = {}
    for row, tensor in enumerate(tensors):
        rows.setdefault(_where(tensor), []).append(row)
    result = values.clone()
    for (mesh, axes), members in rows.items():
        if mesh is not None:
            part = values[members]
            for axis in axes:
                part = _combined(part, mesh, axis, is_max=is_max)
            result[members] = part
    return result


def _combined(values: Tensor, mesh: DeviceMesh, axis: int, *, is_max: bool) -> Tensor:
    group = mesh.get_group(axis)
    if not is_max:
        values = values.clone()
        dist.all_reduce(values, dist.ReduceOp.SUM, group=group)
        return values
    return largest_over_ranks(values, group)


def largest_over_ranks(values: Tensor, group: object = None) -> Tensor:
    """Return the elementwise maximum over the ranks of a group, where NaN exceeds all numbers. Call it on each rank.

    Args:
        values: A floating-point tensor.
        group: Ranks that take part; None for all.
    """
    # A NaN compares as neither larger nor smaller: gloo would keep or drop it by the order of the ranks.
    is_nan = values.isnan()
    both = torch.stack([values.masked_fill(is_nan, -math.inf), is_nan.to(values.dtype)])
    dist.all_reduce(both, dist.ReduceOp.MAX, group=group)
    return both[0].masked_fill(both[1].bool(), math.nan)


def scale_to_norm(gradients: Sequence[Tensor], max_norm: float, norm: Tensor) -> None:
    """Scale gradients in place so that their norm is at most `max_norm`.

    Source: Pascanu et al. 2013, eq. 7; like torch, it adds a small constant to avoid a division by zero.
    """
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    by_device: dict[torch.device, list[Tensor]] = {}
    for part in local(gradients):
        by_device.setdefault(part.device, []).append(part)
    for device, parts in by_device.items():
        torch._foreach_mul_(parts, factor.to(device))


def _where(gradient: Tensor) -> tuple[DeviceMesh | None, tuple[int, ...]]:
    """Return the mesh of a gradient and the axes over which its ranks hold different parts."""
    if not is_sharded(gradient):
        return None, ()
    # Not `is_shard()`: it is False for a parameter sharded by tensor parallelism and then by FSDP.
    axes = tuple(axis for axis, placement in enumerate(gradient.placements) if not placement.is_replicate())
    return gradient.device_mesh, axes


def _powered(gradients: Sequence[Tensor], norm_type: float) -> Tensor:
    """Return the sum of |x|^p over this rank's shards, or their largest |x|."""
    parts = [part.abs() if part.is_complex() else part for part in local(gradients)]
    dtype = torch.float32
    for one in gradients:  # of all, so that each rank has the same, whatever its shards are
        dtype = torch.promote_types(dtype, one.dtype.to_real() if one.is_complex() else one.dtype)
    if not parts:
        return torch.zeros((), dtype=dtype, device=gradients[0].device)
    norms = torch.stack([norm.to(parts[0].device) for norm in torch._foreach_norm(parts, norm_type, dtype=dtype)])
    return norms.max() if math.isinf(norm_type) else (norms**norm_type).sum()
