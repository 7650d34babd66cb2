"""Collectives between replicas of XLA.

On a TPU the runtime connects the devices of all processes, and collectives are operations of a graph. All replicas must
run the same form of such a graph, or they wait for each other forever. So the graph of a collective holds nothing else,
unless all replicas compute the same. A CPU's runtime connects no processes: there tensors go through the host, to try a
program without a TPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ...accelerators.xla import import_xla

_OPS = {"sum": "sum", "min": "min", "max": "max", "product": "mul"}


class Collectives(Protocol):
    """Collectives that a strategy needs; called on every rank, in the same order."""

    def sum_in_place(self, tensors: Sequence[Tensor], scale: float = 1.0) -> None:
        """Overwrite tensors of the device with their sums over ranks, times `scale`. Floating point only."""
        ...

    def reduce(self, tensor: Tensor, op: str) -> Tensor:
        """Return a new tensor of the device: "sum", "min", "max" or "product" over ranks."""
        ...

    def gather(self, tensor: Tensor) -> Tensor:
        """Return the tensors of all ranks, stacked along a new first dimension, in rank order."""
        ...


class RuntimeCollectives:
    """Collectives of XLA's runtime.

    Args:
        ordinals: The runtime's number of each rank's device, in rank order. On several hosts it need not be the rank.
    """

    def __init__(self, ordinals: Sequence[int]) -> None:
        self._model = import_xla("torch_xla.core.xla_model")
        self._order = None if list(ordinals) == list(range(len(ordinals))) else list(ordinals)

    def sum_in_place(self, tensors: Sequence[Tensor], scale: float = 1.0) -> None:
        """Overwrite tensors with their sums over ranks, times `scale`, in one operation."""
        if not tensors:
            return
        # torch_xla 2.9 sums copies correctly, but not accumulated gradients: in place, ranks got different values. The
        # compiler removes copies that are not needed.
        sums = [one.detach().clone() for one in tensors]
        self._model.all_reduce("sum", sums, scale=scale)
        with torch.no_grad():
            for one, total in zip(tensors, sums, strict=True):
                one.copy_(total)

    def reduce(self, tensor: Tensor, op: str) -> Tensor:
        """Return the reduction over ranks."""
        results: list[Tensor] = self._model.all_reduce(_OPS[op], [tensor.clone()])
        return results[0]

    def gather(self, tensor: Tensor) -> Tensor:
        """Return the tensors of all ranks, stacked."""
        # torch_xla's default pads by the ordinal and sums: a graph that differs by rank.
        gathered: Tensor = self._model.all_gather(tensor.unsqueeze(0), dim=0, pin_layout=False)
        if self._order is None:
            return gathered
        return gathered.index_select(0, torch.tensor(self._order).to(tensor.device))


class HostCollectives:
    """Collectives through the hosts' process group, for XLA on CPUs. Each waits for the device."""

    def sum_in_place(self, tensors: Sequence[Tensor], scale: float = 1.0) -> None:
        """Overwrite tensors with their sums over ranks, times `scale`; one message for each dtype."""
        kinds: dict[torch.dtype, list[Tensor]] = {}
        for tensor in tensors:
            kinds.setdefault(tensor.dtype, []).append(tensor)
        for members in kinds.values():
            copies: list[Tensor] = import_xla()._XLAC._xla_get_cpu_tensors(members)
            flat = torch.cat([one.reshape(-1) for one in copies])
            dist.all_reduce(flat)
            flat.mul_(scale)
            pieces = flat.split([one.numel() for one in members])
            with torch.no_grad():
                for tensor, piece in zip(members, pieces, strict=True):
                    # A separate copy: the device reads the host's memory later.
                    tensor.copy_(piece.clone().view(tensor.shape).to(tensor.device))

    def reduce(self, tensor: Tensor, op: str) -> Tensor:
        """Return the reduction over ranks."""
        copy = tensor.cpu()
        dist.all_reduce(copy, getattr(dist.ReduceOp, op.upper()))
        return copy.to(tensor.device)

    def gather(self, tensor: Tensor) -> Tensor:
        """Return the tensors of all ranks, stacked."""
        copy = tensor.cpu().contiguous()
        parts = [torch.empty_like(copy) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, copy)
        return torch.stack(parts).to(tensor.device)


def reduce_as(collectives: Collectives, tensor: Tensor, op: str, size: int) -> Tensor:
    """Return a reduction with the dtypes of `distributed/collectives.py`: wide sums, and a float mean of integers."""
    is_number = tensor.dtype.is_floating_point or tensor.dtype.is_complex
    wide = tensor.dtype
    if not is_number:
        wide = torch.int64
    elif tensor.dtype.is_floating_point and tensor.dtype.itemsize < 4:
        wide = torch.float32
    result = collectives.reduce(tensor.to(wide), "sum" if op == "mean" else op)
    if op == "mean":
        return (result / size).to(tensor.dtype) if is_number else result.to(torch.float64) / size
    return result if op in ("sum", "product") and not is_number else result.to(tensor.dtype)


def gather_with_gradient(
    collectives: Collectives, tensor: Tensor, rank: int, alone: Callable[[], AbstractContextManager[None]]
) -> Tensor:
    """Return the tensors of all ranks, stacked; backward sums over ranks and returns this rank's slice.

    Args:
        collectives: Of the strategy.
        tensor: This rank's tensor, on the device.
        rank: This rank.
        alone: Context that records its own graph.
    """
    gathered: Tensor = _Gather.apply(tensor, collectives, rank, alone)  # type: ignore[no-untyped-call]
    return gathered


class _Context(Protocol):
    collectives: Collectives
    rank: int
    alone: Callable[[], AbstractContextManager[None]]


class _Gather(torch.autograd.Function):
    """See `gather_with_gradient`."""

    @staticmethod
    def forward(
        ctx: _Context,
        tensor: Tensor,
        collectives: Collectives,
        rank: int,
        alone: Callable[[], AbstractContextManager[None]],
    ) -> Tensor:
        ctx.collectives, ctx.rank, ctx.alone = collectives, rank, alone
        with alone():
            return collectives.gather(tensor)

    @staticmethod
    def backward(ctx: _Context, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        with ctx.alone():
            total = ctx.collectives.reduce(gradient, "sum")
        return total[ctx.rank], None, None, None
