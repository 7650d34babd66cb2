"""Exchange of tokens between the ranks that share the experts of a layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from .permute import permute

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed import ProcessGroup

    from ...autograd import AutogradContext

# Any in this file: torch.autograd.Function's context.


class _AllToAll(torch.autograd.Function):
    """Rows to other ranks; the gradients of those that came go back."""

    @staticmethod
    def forward(
        ctx: AutogradContext, rows: Tensor, sent: list[int], received: list[int], group: ProcessGroup
    ) -> Tensor:
        ctx.arguments = sent, received, group
        return _all_to_all(rows, sent, received, group)

    @staticmethod
    def backward(ctx: AutogradContext, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        sent, received, group = ctx.arguments
        # Another exchange, so that gradients can be differentiated again.
        return _AllToAll.apply(gradients[0], received, sent, group), None, None, None  # type: ignore[no-untyped-call]


class _Shared(torch.autograd.Function):
    """A weight that the tokens of several ranks use; its gradient is divided by their number."""

    @staticmethod
    def forward(ctx: AutogradContext, weight: Tensor, num_ranks: int) -> Tensor:
        ctx.num_ranks = num_ranks
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: AutogradContext, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] / ctx.num_ranks, None


def shared(weight: Tensor, group: ProcessGroup) -> Tensor:
    """Return a weight whose gradient is the mean over the ranks of a group, where each has used it for its own loss.

    The backward pass of `exchange` brings the gradients of all these losses here, and so adds them. Strategies average
    over ranks: over those with other losses only, which are fewer than all by the size of the group.
    """
    result: Tensor = _Shared.apply(weight, group.size())  # type: ignore[no-untyped-call]
    return result


def exchange(rows: Tensor, counts: Tensor, group: ProcessGroup, compute: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Return what the ranks that hold the experts compute for these rows. On every rank of the group.

    Args:
        rows: Shape (n, dim): sorted by expert; the dtype is the same on all ranks.
        counts: Shape (num_experts,), int64: number of rows for each expert; their sum is n.
        group: The ranks: the first has the first of the experts.
        compute: Called once with the rows for this rank's experts, sorted by expert and, for one expert, by the rank
            that they came from; and with their counts. Returns rows of any width in that order.
    """
    num_ranks = group.size()
    arrived = torch.empty_like(counts)
    dist.all_to_all_single(arrived, counts, group=group)
    table = arrived.view(num_ranks, -1)  # ranks that they came from x experts of this rank
    # On a GPU this waits for the counts: sizes of tensors are needed on the CPU.
    sent, received = torch.stack([counts.view(num_ranks, -1).sum(1), table.sum(1)]).tolist()
    mine: Tensor = _AllToAll.apply(rows, sent, received, group)  # type: ignore[no-untyped-call]
    expert = torch.arange(table.shape[1], device=rows.device).repeat(num_ranks)
    order = expert.repeat_interleave(arrived, output_size=sum(received)).argsort(stable=True)
    outputs = compute(permute(mine, order), table.sum(0))
    result: Tensor = _AllToAll.apply(permute(outputs, order.argsort()), received, sent, group)  # type: ignore[no-untyped-call]
    return result


def _all_to_all(rows: Tensor, sent: list[int], received: list[int], group: ProcessGroup) -> Tensor:
    result = rows.new_empty((sum(received), *rows.shape[1:]))
    dist.all_to_all_single(result, rows.contiguous(), received, sent, group=group)
    return result
