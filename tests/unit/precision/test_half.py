from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from loopwright.errors import ConfigError
from loopwright.precision import HalfPrecision


@pytest.mark.parametrize(("name", "dtype"), [("16-true", torch.float16), ("bf16-true", torch.bfloat16)])
def test_parameters_inputs_and_new_tensors_have_16_bits(name: str, dtype: torch.dtype) -> None:
    precision = HalfPrecision(name)
    module = precision.convert_module(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    assert {p.dtype for p in module.parameters()} == {dtype}
    assert module[1].num_batches_tracked.dtype is torch.int64
    with precision.forward_context():
        output = module(precision.convert_input(torch.ones(4, 2)))
        assert torch.zeros(1).dtype is dtype
    assert output.dtype is dtype
    assert precision.convert_output(output).dtype is torch.float32
    with precision.module_init_context():
        assert nn.Linear(2, 2).weight.dtype is dtype
    with precision.tensor_init_context():
        assert torch.empty(1).dtype is dtype
    assert torch.get_default_dtype() is torch.float32


def test_another_name_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"precision='16_true' \(did you mean '16-true'"):
        HalfPrecision("16_true")


class Rotates(nn.Module):
    """A module with one buffer of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("inv_freq", 1.0 / 10000 ** (torch.arange(0, 64, 2) / 64), persistent=False)
        self.register_buffer("scale", torch.tensor([1.0, 1 / 3]))
        self.register_buffer("count", torch.tensor(3), persistent=False)
        self.register_buffer("nothing", None, persistent=False)


@pytest.mark.parametrize(
    ("keep", "kept"), [(None, {"1.inv_freq"}), ([], set()), (["*.scale", "other"], {"1.scale"}), (["1.*"], None)]
)
def test_buffers_that_state_dicts_leave_out_or_that_are_named_keep_their_digits(keep: Any, kept: Any) -> None:
    module = nn.Sequential(nn.BatchNorm1d(2), Rotates())
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    converted = HalfPrecision("bf16-true", keep_buffers=keep).convert_module(module)
    kept = {"1.inv_freq", "1.scale"} if kept is None else kept
    for name, buffer in converted.named_buffers():
        if before[name].is_floating_point():
            assert (buffer.dtype is torch.float32) is (name in kept), name
            assert torch.equal(buffer, before[name].to(buffer.dtype)), name
    assert {parameter.dtype for parameter in converted.parameters()} == {torch.bfloat16}
    with pytest.raises(TypeError, match=r"pass \['inv_freq'\]"):
        HalfPrecision("bf16-true", keep_buffers="inv_freq")
