"""The grouped product and the one of one expert after the other; strategies/mesh/experts/weights.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from loopwright.strategies.mesh.experts import weights as weights_module
from loopwright.strategies.mesh.experts.weights import ExpertWeights

COUNTS = torch.tensor([3, 0, 5, 4])


def weights(dim: int, hidden: int, dtype: torch.dtype) -> ExpertWeights:
    torch.manual_seed(0)
    return ExpertWeights(dim, hidden, 4, activation=nn.functional.gelu, gated=True, dtype=dtype)


def results(module: ExpertWeights, rows: Tensor) -> list[Tensor]:
    inputs = [rows.clone().requires_grad_(), *module.parameters()]
    y = module(inputs[0], COUNTS)
    return [y, *torch.autograd.grad(y.float().square().sum(), inputs)]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 5e-2)])
def test_both_products_agree(dtype: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch) -> None:
    module, rows = weights(16, 32, dtype), torch.randn(12, 16).to(dtype)
    grouped = results(module, rows)
    called: list[int] = []

    def refused(weight: Tensor) -> bool:
        called.append(1)
        return False

    monkeypatch.setattr(weights_module, "_is_groupable", refused)
    one_by_one = results(module, rows)
    assert called
    for ours, theirs in zip(grouped, one_by_one, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("dim", "hidden", "dtype"),
    [(16, 32, torch.float64), (16, 32, torch.float16), (3, 5, torch.float32), (4, 4, torch.bfloat16)],
    ids=["float64", "float16", "not aligned", "not aligned in bfloat16"],
)
def test_what_grouped_mm_refuses_is_computed_all_the_same(dim: int, hidden: int, dtype: torch.dtype) -> None:
    module = weights(dim, hidden, dtype)
    found = results(module, torch.randn(12, dim).to(dtype))
    assert all(one.isfinite().all() and one.dtype == dtype for one in found)
    assert found[0].shape == (12, dim)


@pytest.mark.skipif(not hasattr(nn.functional, "grouped_mm"), reason="this torch has no grouped_mm")
def test_the_product_is_grouped_where_it_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[int] = []
    original: Any = nn.functional.grouped_mm

    def counting(*args: Any, **kwargs: Any) -> Tensor:
        called.append(1)
        result: Tensor = original(*args, **kwargs)
        return result

    monkeypatch.setattr(nn.functional, "grouped_mm", counting)
    results(weights(16, 32, torch.float32), torch.randn(12, 16))
    assert len(called) == 3


def test_autocast_lowers_the_products() -> None:
    module = weights(16, 32, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y = module(torch.randn(12, 16), COUNTS)
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert module.up.grad is not None
    assert module.up.grad.dtype == torch.float32


def test_weights_begin_as_those_of_linear_layers() -> None:
    module = weights(16, 64, torch.float32)
    assert module.up.abs().max() <= 0.25
    assert module.up.abs().max() > 0.24
    assert module.down.abs().max() <= 0.125
    assert module.gate is not None
    assert not torch.equal(module.gate, module.up)
