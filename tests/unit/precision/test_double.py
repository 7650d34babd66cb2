from __future__ import annotations

import torch
from torch import nn

from loopwright.precision import DoublePrecision


def test_parameters_inputs_and_new_tensors_are_float64() -> None:
    precision = DoublePrecision()
    module = precision.convert_module(nn.Linear(2, 2))
    with precision.forward_context():
        output = module(precision.convert_input(torch.ones(4, 2)))
        assert torch.zeros(1).dtype is torch.float64
    assert output.dtype is torch.float64
    assert precision.convert_output(torch.ones(1)).dtype is torch.float64
    with precision.module_init_context():
        assert nn.Linear(2, 2).weight.dtype is torch.float64
    with precision.tensor_init_context():
        assert torch.empty(1).dtype is torch.float64
    assert torch.get_default_dtype() is torch.float32
