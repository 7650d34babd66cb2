"""Reordering of rows whose backward pass reorders too, where torch's own indexing would add."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ...autograd import AutogradContext


# Any in this file: torch.autograd.Function's context.


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: AutogradContext, rows: Tensor, order: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        return rows[order]

    @staticmethod
    def backward(ctx: AutogradContext, *gradients: Tensor) -> tuple[Tensor, None]:
        (order,) = ctx.saved_tensors
        # Contiguous, also for a gradient such as that of a sum, which has strides of 0: grouped_mm takes no other.
        return gradients[0].contiguous()[order.argsort()], None


def permute(rows: Tensor, order: Tensor) -> Tensor:
    """Return the rows in another order, with separate memory.

    Args:
        rows: Shape (n, ...).
        order: Shape (n,), int64: a permutation; row i of the result is row order[i].
    """
    result: Tensor = _Permute.apply(rows, order)  # type: ignore[no-untyped-call]
    return result
