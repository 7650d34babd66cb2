"""`SequenceParts`: the processes that share a sequence, and the collectives with gradients between their parts.

Every rank holds one part of equal length, in rank order. The gradient of a sum over ranks of their losses flows
through these functions: what rank i sends, it gets back as the sum of what all ranks pass back for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...distributed.collectives import gather_objects

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from ...autograd import AutogradContext

T = TypeVar("T")

# Any in this file: contexts of autograd functions.

# Older versions of torch have them under another name.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class SequenceParts:
    """The processes that share a sequence.

    Attributes:
        group: These processes; None: all.
        rank: Which part this process has.
        size: Number of parts.
        same_batch: The processes that have the same layers and read the same batch: those of `group`, and those that
            split these layers; None: those of `group`.
        num_splits: Among how many processes the layers of one part are split.
    """

    group: ProcessGroup | None
    rank: int
    size: int
    same_batch: ProcessGroup | None = None
    num_splits: int = 1

    def split(self, tensor: Tensor, dim: int) -> Tensor:
        """Return this rank's part of a tensor that all ranks have: a view."""
        return tensor.chunk(self.size, dim)[self.rank]

    def gather(self, tensor: Tensor, dim: int) -> Tensor:
        """Return the parts of all ranks, joined along a dimension; with gradients. On every rank of the group."""
        result: Tensor = _Gather.apply(tensor, dim, self)  # type: ignore[no-untyped-call]
        return result

    def exchange(self, tensor: Tensor, split: int, join: int) -> Tensor:
        """Return a tensor split along one dimension that was joined along another; with gradients.

        Args:
            tensor: The same shape on all ranks; dimension `split` is a multiple of their number.
            split: The dimension whose chunk i goes to rank i.
            join: The dimension along which the ranks' chunks are joined.
        """
        result: Tensor = _Exchange.apply(tensor, split, join, self)  # type: ignore[no-untyped-call]
        return result

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum over ranks of tensors of one shape; with gradients, which are equal on all ranks."""
        result: Tensor = _Sum.apply(tensor, self)  # type: ignore[no-untyped-call]
        return result

    def add(self, tensor: Tensor) -> Tensor:
        """Return the sum over ranks of tensors of one shape; with gradients, which may differ between ranks."""
        result: Tensor = _Add.apply(tensor, self)  # type: ignore[no-untyped-call]
        return result

    def objects(self, obj: T) -> list[T]:
        """Return the objects of all ranks that read the same batch, in rank order. On every one of them."""
        return gather_objects(obj, self.same_batch or self.group)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: AutogradContext, tensor: Tensor, dim: int, parts: SequenceParts) -> Tensor:
        ctx.dim, ctx.parts = dim, parts
        mine = tensor.movedim(dim, 0).contiguous()
        joined = mine.new_empty((parts.size * mine.shape[0], *mine.shape[1:]))
        _all_gather(joined, mine, group=parts.group)
        return joined.movedim(0, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: AutogradContext, gradient: Tensor) -> tuple[Tensor, None, None]:
        parts: SequenceParts = ctx.parts
        whole = gradient.movedim(ctx.dim, 0).contiguous()
        mine = whole.new_empty((whole.shape[0] // parts.size, *whole.shape[1:]))
        _reduce_scatter(mine, whole, group=parts.group)
        return mine.movedim(0, ctx.dim), None, None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: AutogradContext, tensor: Tensor, split: int, join: int, parts: SequenceParts) -> Tensor:
        ctx.split, ctx.join, ctx.parts = split, join, parts
        return _exchange(tensor, split, join, parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: AutogradContext, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchange(gradient, ctx.join, ctx.split, ctx.parts), None, None, None


def _exchange(tensor: Tensor, split: int, join: int, parts: SequenceParts) -> Tensor:
    sent = torch.stack([chunk.contiguous() for chunk in tensor.chunk(parts.size, split)])
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=parts.group)
    return torch.cat(list(received), join)


class _Add(torch.autograd.Function):
    @staticmethod
    def forward(ctx: AutogradContext, tensor: Tensor, parts: SequenceParts) -> Tensor:
        ctx.parts = parts
        return _added(tensor, parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: AutogradContext, gradient: Tensor) -> tuple[Tensor, None]:
        return _added(gradient, ctx.parts), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: AutogradContext, tensor: Tensor, parts: SequenceParts) -> Tensor:
        ctx.size = parts.size
        return _added(tensor, parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: AutogradContext, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.size, None


def _added(tensor: Tensor, parts: SequenceParts) -> Tensor:
    total = tensor.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=parts.group)
    return total
