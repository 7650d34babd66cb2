"""Gradients over the stages of a pipeline: sums over shared parameters, and norms."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...distributed.clipping import largest_over_ranks, total_norm
from ...distributed.shards import is_sharded

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from .split import StageSplit


def add_shared_gradients(split: StageSplit, group: ProcessGroup) -> None:
    """Add the gradients of each shared parameter over the pipeline's ranks that have it, in rank order.

    On every rank of the pipeline: it communicates. A rank without a gradient adds nothing; a parameter without one on
    every rank keeps none. Of sharded parameters, ranks add their local shards, which are of the same elements.

    Args:
        split: This rank's stages.
        group: The ranks of the pipeline.
    """
    buckets: dict[tuple[tuple[int, ...], torch.dtype], list[nn.Parameter]] = {}
    for ranks, parameter in _shared_here(split):
        if parameter.requires_grad:
            buckets.setdefault((ranks, parameter.dtype), []).append(parameter)
    for (ranks, _), parameters in buckets.items():
        _add(parameters, ranks, split.rank, group)


def norm_over_stages(
    split: StageSplit, group: ProcessGroup, parameters: Iterable[Tensor], norm_type: float, device: torch.device
) -> Tensor:
    """Return the norm of all stages' gradients as one vector. On every rank of the pipeline: it communicates.

    Args:
        split: This rank's stages; a shared parameter counts on the first rank that has it.
        group: The ranks of the pipeline.
        parameters: Those of this rank whose gradients count.
        norm_type: Order of the norm; may be infinity.
        device: Of the result, whose shape is ().

    Source: the stages' norms to the power p are added, and the root is taken of the sum.
    """
    elsewhere = {id(parameter) for ranks, parameter in _shared_here(split) if ranks[0] != split.rank}
    own = [one.grad for one in parameters if one.grad is not None and id(one) not in elsewhere]
    norm = total_norm(own, norm_type).to(device)
    if math.isinf(norm_type):
        return largest_over_ranks(norm, group)
    total = norm.to(torch.float64 if norm.device.type != "mps" else torch.float32) ** norm_type
    dist.all_reduce(total, group=group)
    return (total ** (1.0 / norm_type)).to(norm.dtype)


def _shared_here(split: StageSplit) -> Iterable[tuple[tuple[int, ...], nn.Parameter]]:
    if not split.shared:
        return
    own = dict(split.module.named_parameters(remove_duplicate=False))
    for shared in split.shared:
        if split.rank in shared.ranks:
            yield shared.ranks, own[next(name for name in shared.names if name in own)]


def _add(parameters: list[nn.Parameter], ranks: tuple[int, ...], rank: int, group: ProcessGroup) -> None:
    # The last elements tell which gradients there are.
    gradients = [None if one.grad is None else _local(one.grad) for one in parameters]
    there = torch.tensor([float(one is not None) for one in gradients])
    parts = [
        torch.zeros_like(_local(parameter.detach())) if gradient is None else gradient
        for parameter, gradient in zip(parameters, gradients, strict=True)
    ]
    flat = torch.cat([*(one.reshape(-1) for one in parts), there.to(parts[0])])
    if rank == ranks[0]:
        for other in ranks[1:]:
            theirs = torch.empty_like(flat)
            dist.recv(theirs, group=group, group_src=other)
            flat += theirs
        for other in ranks[1:]:
            dist.send(flat, group=group, group_dst=other)
    else:
        dist.send(flat, group=group, group_dst=ranks[0])
        dist.recv(flat, group=group, group_src=ranks[0])
    missing = None in gradients
    is_there = flat[-len(parameters) :].tolist() if missing else [1.0] * len(parameters)
    sums = flat[: -len(parameters)].split([one.numel() for one in parts])
    for parameter, part, total, count in zip(parameters, parts, sums, is_there, strict=True):
        if not count:
            continue
        part.copy_(total.view_as(part))
        if parameter.grad is None:
            parameter.grad = _like(parameter, part)


def _local(tensor: Tensor) -> Tensor:
    part: Tensor = tensor.to_local() if is_sharded(tensor) else tensor
    return part


def _like(parameter: nn.Parameter, part: Tensor) -> Tensor:
    if not is_sharded(parameter):
        return part
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        part, parameter.device_mesh, parameter.placements, run_check=False, shape=parameter.shape,
        stride=parameter.stride(),
    )  # fmt: skip
