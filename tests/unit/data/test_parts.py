"""Batches in parts along their first dimension, and joined outputs of these parts."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence

from loopwright.data.parts import join_outputs, split_batch
from loopwright.errors import DataError

# Any in this file: batches.

Pair = namedtuple("Pair", ["x", "y"])


@dataclass(frozen=True)
class Sample:
    x: Tensor
    name: str


def rows(count: int) -> Tensor:
    return torch.arange(count * 2).reshape(count, 2)


@pytest.mark.parametrize(
    ("count", "num_parts", "sizes"), [(8, 4, [2, 2, 2, 2]), (6, 4, [2, 2, 1, 1]), (3, 4, [1, 1, 1]), (5, 1, [5])]
)
def test_parts_are_the_rows_in_their_order(count: int, num_parts: int, sizes: list[int]) -> None:
    parts, found = split_batch(rows(count), num_parts)
    assert found == sizes == [len(part) for part in parts]
    assert torch.equal(torch.cat(parts), rows(count))


def test_containers_keep_their_types_and_what_belongs_to_no_sample_is_in_every_part() -> None:
    batch = {
        "pair": Pair(rows(4), [torch.arange(4)]), "sample": Sample(rows(4), "name"), "scale": 0.5, "nothing": None,
        "weight": torch.tensor(3.0), "size": (224, 224, 3, 1), "ids": [7, 8, 9, 10], "names": ("a", "b", "c", "d"),
    }  # fmt: skip
    parts, _ = split_batch(batch, 2)
    for index, part in enumerate(parts):
        where = slice(2 * index, 2 * index + 2)
        assert type(part["pair"]) is Pair
        assert torch.equal(part["pair"].x, rows(4)[where])
        assert torch.equal(part["pair"].y[0], torch.arange(4)[where])
        assert torch.equal(part["sample"].x, rows(4)[where])
        assert (part["sample"].name, part["scale"], part["nothing"]) == ("name", 0.5, None)
        assert part["weight"] is batch["weight"]
        assert part["size"] == (224, 224, 3, 1)
        assert part["ids"] == batch["ids"][where]
        assert part["names"] == batch["names"][where]


class Graph:
    def to(self, device: Any) -> Graph:
        return self


@pytest.mark.parametrize(
    ("batch", "text"),
    [
        ({"x": rows(4), "weights": torch.ones(11)}, r"micro_batches=4, got tensors of shapes \(4, 2\), \(11,\)"),
        ([torch.tensor(1.0)], "got tensors of shapes "),
        ({"n": 3}, "got no tensors"),
        ((rows(4), Graph()), "got a Graph"),
        ((rows(4), numpy.zeros(4)), "got a ndarray"),
        (pack_sequence([torch.ones(2), torch.ones(1)]), "got a PackedSequence"),
    ],
)
def test_what_cannot_be_split_is_named(batch: Any, text: str) -> None:
    with pytest.raises(DataError, match=text):
        split_batch(batch, 4)


def test_samples_along_another_dimension_are_refused() -> None:
    with pytest.raises(DataError, match=r"got tensors of shapes \(4, 2\) in a batch of 2 samples"):
        split_batch(rows(4), 2, num_samples=2)


def test_outputs_are_joined_as_batches_are_split() -> None:
    outputs = [{"loss": torch.tensor(1.0), "logits": rows(2), "n": 1}, {"loss": torch.tensor(2.0), "logits": rows(1)}]
    joined = join_outputs(outputs, [2, 1])
    assert torch.equal(joined["logits"], torch.cat([rows(2), rows(1)]))
    assert joined["n"] == [1, None]
    assert join_outputs(outputs[:1], [2]) is outputs[0]
