"""Deferred reduction: full gradients that backward passes without synchronization have left on each rank.

They wait in torch's objects beside the parameters, where neither an optimizer nor a checkpoint sees them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..distributed.shards import as_shards, full_tensor, is_sharded

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam


def holds_gradient(one: FSDPParam) -> bool:
    """Return whether a gradient of this parameter waits on this rank."""
    return one.unsharded_accumulated_grad is not None or _latest(one) is not None


def forget(members: Collection[FSDPParam]) -> None:
    """Drop the gradients that wait on this rank."""
    for one in members:
        one.unsharded_accumulated_grad = None
        full = getattr(one, "_unsharded_param", None)
        if full is not None:
            full.grad = None


def average(members: Sequence[FSDPParam], group: ProcessGroup | None = None) -> None:
    """Do what a synchronized backward pass does: add the local shard of the average to the sharded gradients.

    On every rank: it communicates. One gradient at a time has a second full copy. One that only some ranks have counts
    as 0 on the others.

    Args:
        members: The same parameters in the same order on all ranks.
        group: The ranks; None: all.
    """
    if not members:
        return
    device = members[0].sharded_param.device
    there = torch.tensor([float(holds_gradient(one)) for one in members]).to(device)
    dist.all_reduce(there, group=group)
    with torch.no_grad():
        for one, count in zip(members, there.tolist(), strict=True):
            if count:
                _average_one(one, group)
    forget(members)


def _average_one(one: FSDPParam, group: ProcessGroup | None) -> None:
    parameter: Any = one.sharded_param  # Any: a parameter and a DTensor
    gradient = _full_gradient(one)
    dist.all_reduce(gradient.div_(dist.get_world_size(group)), group=group)
    part = as_shards(gradient.to(parameter.dtype), parameter)
    if parameter.grad is None:
        parameter.grad = part
    else:
        parameter.grad += part


def _full_gradient(one: FSDPParam) -> Tensor:
    """Return what waits, with separate memory; zeros where other ranks have something and this one has nothing."""
    waiting = [gradient for gradient in (one.unsharded_accumulated_grad, _latest(one)) if gradient is not None]
    if not waiting:
        parameter = one.sharded_param
        dtype = one.reduce_dtype or one.param_dtype or parameter.dtype
        device = getattr(one, "device", parameter.device)
        return torch.zeros(parameter.shape, dtype=dtype, device=device)
    dtype = one.reduce_dtype or waiting[0].dtype
    # Contiguous, as collectives need it, and a copy.
    total = torch.zeros(waiting[0].shape, dtype=dtype, device=waiting[0].device)
    for gradient in waiting:
        # A parameter that tensor parallelism shards has a part of it here; its ranks read the same data.
        total += full_tensor(gradient) if is_sharded(gradient) else gradient
    return total


def _latest(one: object) -> Tensor | None:
    full = getattr(one, "_unsharded_param", None)
    return None if full is None else full.grad
