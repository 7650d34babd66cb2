"""Reordering of rows and its gradient; strategies/mesh/experts/permute.py."""

from __future__ import annotations

import torch

from loopwright.strategies.mesh.experts.permute import permute


def test_rows_and_gradients_are_reordered() -> None:
    rows = torch.randn(5, 2, dtype=torch.float64, requires_grad=True)
    order = torch.tensor([3, 1, 4, 0, 2])
    assert torch.equal(permute(rows, order), rows[order])
    assert torch.autograd.gradcheck(lambda x: permute(x, order), rows)


def test_a_gradient_without_strides_becomes_contiguous() -> None:
    seen = []
    rows = torch.randn(4, 2, requires_grad=True)
    x = rows * 1
    x.register_hook(lambda gradient: seen.append(gradient.is_contiguous()))
    permute(x, torch.arange(4)).sum().backward()  # the gradient of a sum has strides of 0
    assert seen == [True]
