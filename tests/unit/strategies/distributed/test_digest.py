"""Digests against sums that are written out, and what they see."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor
from torch.testing._internal.two_tensor import TwoTensor

from loopwright.strategies.distributed import digest
from loopwright.strategies.distributed.digest import digests, parts_of

CPU = torch.device("cpu")


def of(*tensors: Tensor) -> list[int]:
    return digests([parts_of(one) for one in tensors], CPU).tolist()


def written_out(tensors: list[Tensor]) -> list[int]:
    position, found = 0, []
    for tensor in tensors:
        raw = bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())
        raw += bytes(-len(raw) % 4)
        total = 0
        for at in range(0, len(raw), 4):
            total += int.from_bytes(raw[at : at + 4], "little", signed=True) * (2 * position + 1)
            position += 1
        found.append((total + 2**63) % 2**64 - 2**63)
    return found


TENSORS = [
    torch.randn(3, 5),
    torch.zeros(0, 4),
    torch.tensor(1.5),
    torch.randn(7).bfloat16(),
    torch.randn(9).bfloat16()[1:4],
    torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
    torch.tensor([True, False, True]),
    torch.randn(5, dtype=torch.complex64),
    torch.randn(4).to(torch.float8_e4m3fn),
    torch.randn(3, 4).t(),
    torch.full((3,), float("nan"), dtype=torch.float64),
    torch.arange(50),
]


@pytest.mark.parametrize("words", [7, 100, 1 << 21])
def test_digests_are_sums_of_words_by_position_for_any_dtype_and_layout(
    words: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digest, "_WORDS", words)
    assert of(*TENSORS) == written_out(TENSORS)
    assert of() == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8])
def test_any_flipped_bit_any_two_of_one_place_and_any_exchange_are_seen(dtype: torch.dtype) -> None:
    value = torch.arange(1, 7).to(dtype)
    before, raw = of(value), value.view(torch.uint8)
    for at, bit in itertools.product(range(len(raw)), range(8)):
        raw[at] ^= 1 << bit
        assert of(value) != before, (at, bit)
        raw[at] ^= 1 << bit
    size = value.element_size()
    for first, second in itertools.combinations(range(6), 2):
        for bit in range(8):  # the same bit of two elements, the sign among them
            for at in (first, second):
                raw[at * size + size - 1] ^= 1 << bit
            assert of(value) != before, (first, second, bit)
            for at in (first, second):
                raw[at * size + size - 1] ^= 1 << bit
        exchanged = value.clone()
        exchanged[[first, second]] = value[[second, first]]
        assert of(exchanged) != before
    assert of(value) == before


def test_tensors_without_readable_bits_have_no_parts_and_subclasses_have_what_they_wrap() -> None:
    assert not parts_of(torch.eye(2).to_sparse())
    assert not parts_of(torch.empty(2, device="meta"))
    first, second = torch.randn(2), torch.randn(2)
    assert list(map(id, parts_of(TwoTensor(first, second)))) == [id(first), id(second)]
