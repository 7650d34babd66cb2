from __future__ import annotations

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
