"""Clipping by norm of ordinary gradients, against torch's own function."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from loopwright.precision.base import clip_dense_norm


def model(dtype: torch.dtype = torch.float32, *, scale: float = 1.0) -> nn.Sequential:
    torch.manual_seed(3)
    made = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3, bias=False), nn.Linear(3, 1)).to(dtype)
    random = torch.Generator().manual_seed(5)
    for parameter in made.parameters():
        parameter.grad = (torch.randn(parameter.shape, generator=random) * scale).to(dtype)
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
@pytest.mark.parametrize("max_norm", [0.1, 1.0, 1e6])
def test_norm_and_gradients_have_the_bits_of_torch(dtype: torch.dtype, norm_type: float, max_norm: float) -> None:
    ours, theirs = model(dtype), model(dtype)
    norm = clip_dense_norm(torch.optim.SGD(ours.parameters(), lr=1.0), max_norm, norm_type)
    expected = nn.utils.clip_grad_norm_(theirs.parameters(), max_norm, norm_type)
    assert norm is not None
    assert torch.equal(norm, expected)
    assert norm.dtype == expected.dtype
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert one.grad is not None
        assert torch.equal(one.grad, other.grad)  # type: ignore[arg-type]  # torch's stubs: it may be None


@pytest.mark.parametrize("scale", [0.0, math.inf, math.nan])
def test_gradients_that_are_zero_or_not_finite_are_those_of_torch(scale: float) -> None:
    ours, theirs = model(scale=scale), model(scale=scale)
    norm = clip_dense_norm(torch.optim.SGD(ours.parameters(), lr=1.0), 1.0, 2.0)
    assert norm is not None
    expected = nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
    assert torch.equal(norm.nan_to_num(7), expected.nan_to_num(7))
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.equal(one.grad.nan_to_num(7), other.grad.nan_to_num(7))


def test_parameters_without_gradients_are_left_out() -> None:
    made = model()
    made[1].weight.grad = None
    norm = clip_dense_norm(torch.optim.SGD(made.parameters(), lr=1.0), 1e6, 2.0)
    others = [p.grad for p in made.parameters() if p.grad is not None]
    assert norm is not None
    assert torch.equal(norm, nn.utils.get_total_norm(others))


def dtypes_differ(made: nn.Sequential) -> None:
    made[2] = made[2].double()
    made[2].weight.grad = torch.ones(1, 3, dtype=torch.float64)


def sparse(made: nn.Sequential) -> None:
    assert made[0].weight.grad is not None
    made[0].weight.grad = made[0].weight.grad.to_sparse()


def with_graph(made: nn.Sequential) -> None:
    made[0].weight.grad = made[0].weight.clone()


def without_gradients(made: nn.Sequential) -> None:
    made.zero_grad()


@pytest.mark.parametrize("change", [dtypes_differ, sparse, with_graph, without_gradients])
def test_other_gradients_are_left_to_torch(change) -> None:  # type: ignore[no-untyped-def]
    made = model()
    change(made)
    before = [p.grad.clone() for p in made.parameters() if p.grad is not None]
    assert clip_dense_norm(torch.optim.SGD(made.parameters(), lr=1.0), 0.1, 2.0) is None
    after = [p.grad for p in made.parameters() if p.grad is not None]
    for one, other in zip(before, after, strict=True):
        assert torch.equal(one.to_dense(), other.to_dense())


def test_a_replaced_function_of_torch_is_called_in_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    # As torch_xla does for all devices, with other bits.
    made = torch.nn.Linear(2, 1)
    made(torch.ones(1, 2)).sum().backward()
    before = [p.grad.clone() for p in made.parameters() if p.grad is not None]

    def replaced() -> None: ...

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", replaced)
    assert clip_dense_norm(torch.optim.SGD(made.parameters(), lr=1.0), 0.1, 2.0) is None
    assert all(torch.equal(p.grad, one) for p, one in zip(made.parameters(), before, strict=True) if p.grad is not None)
