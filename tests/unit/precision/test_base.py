from __future__ import annotations

import pytest
import torch
from torch import nn

from loopwright.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from loopwright.precision.base import DefaultDtype


def test_full_precision_does_nothing() -> None:
    precision = Precision()
    module, data, loss = nn.Linear(2, 2), {"x": torch.ones(2)}, torch.ones(())
    assert precision.convert_module(module) is module
    assert precision.convert_input(data) is data
    assert precision.convert_output(data) is data
    assert precision.scale_loss(loss) is loss
    assert precision.state_dict() == {}
    flags = (precision.has_forward_context, precision.has_scaler, precision.converts_input, precision.converts_output)
    assert flags == (False, False, False, False)
    for context in (precision.forward_context, precision.module_init_context, precision.tensor_init_context):
        with context():
            assert torch.empty(1).dtype is torch.float32


def test_a_closure_reaches_the_optimizer() -> None:
    weight = nn.Parameter(torch.tensor([3.0]))
    optimizer = torch.optim.LBFGS([weight], lr=0.5)
    calls = []

    def closure() -> torch.Tensor:
        calls.append(1)
        optimizer.zero_grad()
        loss = (weight**2).sum()
        loss.backward()
        return loss

    assert Precision().optimizer_step(optimizer, closure) is True
    assert len(calls) > 1
    assert abs(weight.item()) < 3.0


def test_policies_say_their_dtypes() -> None:
    assert Precision().policy.param_dtype is torch.float32
    assert HalfPrecision("bf16-true").policy.param_dtype is torch.bfloat16
    assert DoublePrecision().policy.compute_dtype is torch.float64
    mixed = MixedPrecision("16-mixed", "cpu").policy
    assert (mixed.param_dtype, mixed.compute_dtype, mixed.reduce_dtype) == (torch.float32, torch.float16, torch.float32)
    with pytest.raises(AttributeError):
        mixed.param_dtype = torch.float16  # type: ignore[misc]


def test_the_default_dtype_is_restored_after_nesting_and_errors() -> None:
    context = DefaultDtype(torch.float64)
    with context, context, pytest.raises(KeyError), DefaultDtype(torch.float16):  # noqa: PT012
        assert torch.get_default_dtype() is torch.float16
        raise KeyError
    assert torch.get_default_dtype() is torch.float32
