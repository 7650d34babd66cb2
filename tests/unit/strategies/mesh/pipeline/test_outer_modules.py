"""What runs in place of modules before the blocks on later stages: NaN in the shapes of their results."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from loopwright.strategies.mesh.pipeline.block_calls import Position
from loopwright.strategies.mesh.pipeline.outer_modules import OuterCall


class Counting(nn.Module):
    """Embeds tokens, as often as its class says; a factor may be a number or any object with one."""

    num_calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 4)
        self.up = nn.Linear(4, 6)

    def forward(self, tokens: Tensor, width: Any = 6) -> Tensor:
        type(self).num_calls += 1
        return self.up(self.table(tokens))[..., : getattr(width, "value", width)]


class Width:
    def __init__(self, value: int) -> None:
        self.value = value


def side_call() -> OuterCall:
    Counting.num_calls = 0
    module, mode = Counting(), FakeTensorMode(allow_non_fake_inputs=True)
    memo = {}
    for one in module.parameters():
        with mode:
            memo[id(one)] = nn.Parameter(torch.empty(one.shape))
    at = Position("model", 2, stage=1, first=1, end=2, received=torch.zeros(2, 3, 6))
    return OuterCall(module, "embedding", True, False, at, copy.deepcopy(module, memo), mode)


def test_shapes_of_results_are_computed_once_for_each_shape() -> None:
    call = side_call()
    results = [call(torch.zeros(shape, dtype=torch.int64)) for shape in ((2, 3), (2, 5), (2, 3), (2, 5))]
    assert [tuple(one.shape) for one in results] == [(2, 3, 6), (2, 5, 6), (2, 3, 6), (2, 5, 6)]
    assert Counting.num_calls == 2


def test_each_result_is_a_tensor_of_its_own_that_is_nan() -> None:
    call, tokens = side_call(), torch.zeros(2, 3, dtype=torch.int64)
    call(tokens).zero_()
    assert bool(call(tokens).isnan().all())


def test_numbers_among_the_arguments_are_told_apart() -> None:
    call, tokens = side_call(), torch.zeros(2, 3, dtype=torch.int64)
    assert [call(tokens, width).shape[-1] for width in (5, 2, 5)] == [5, 2, 5]
    assert Counting.num_calls == 2


def test_other_objects_among_the_arguments_are_not_compared() -> None:
    call, tokens, width = side_call(), torch.zeros(2, 3, dtype=torch.int64), Width(5)
    first = call(tokens, width)
    width.value = 2
    assert (first.shape[-1], call(tokens, width).shape[-1]) == (5, 2)


def test_dtype_follows_from_autocast() -> None:
    call, tokens = side_call(), torch.zeros(2, 3, dtype=torch.int64)
    plain = call(tokens)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = call(tokens)
    assert (plain.dtype, mixed.dtype, call(tokens).dtype) == (torch.float32, torch.bfloat16, torch.float32)


def test_results_of_many_shapes_are_not_kept() -> None:
    call = side_call()
    for length in range(1, 200):
        call(torch.zeros(1, length, dtype=torch.int64))
    assert len(call.results) <= 64
