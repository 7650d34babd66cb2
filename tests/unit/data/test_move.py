"""Moving batches, mapping over them, and their size."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from loopwright.data import apply_to_collection, find_batch_size, move_to_device

CPU = torch.device("cpu")
META = torch.device("meta")
Pair = namedtuple("Pair", "x y")


@dataclass
class Sample:
    x: Tensor
    name: str = "a"


@dataclass(frozen=True)
class Frozen:
    samples: list[Any]
    count: int = 1


class Own:
    """Moves itself; in place when told so."""

    def __init__(self, *, in_place: bool = False) -> None:
        self.device = CPU
        self.in_place = in_place

    def to(self, device: torch.device) -> Own | None:
        moved = self if self.in_place else Own()
        moved.device = device
        return None if self.in_place else moved


@pytest.mark.parametrize(
    "batch",
    [
        torch.zeros(2),
        [torch.zeros(2), torch.zeros(3)],
        (torch.zeros(2), 3),
        {"x": torch.zeros(2), "y": [torch.zeros(1)]},
        Pair(torch.zeros(2), "text"),
        Sample(torch.zeros(2)),
        "text",
        3,
        None,
    ],
    ids=repr,
)
def test_what_is_there_already_is_returned_itself(batch: Any) -> None:
    assert move_to_device(batch, CPU) is batch


def test_every_container_keeps_its_type() -> None:
    x = torch.zeros(2)
    batch = {
        "list": [x, "text"],
        "pair": Pair(x, 1),
        "ordered": OrderedDict(a=x),
        "default": defaultdict(list, a=x),
        "sample": Sample(x),
        "frozen": Frozen([x]),
    }
    moved = move_to_device(batch, META)
    assert moved["list"][0].device == META
    assert moved["list"][1] == "text"
    assert isinstance(moved["pair"], Pair)
    assert moved["pair"].x.device == META
    assert type(moved["ordered"]) is OrderedDict
    assert moved["default"].default_factory is list
    assert moved["default"]["a"].device == META
    assert moved["sample"].x.device == META
    assert moved["frozen"].samples[0].device == META
    assert batch["list"][0].device == CPU


@pytest.mark.parametrize(
    "batch", [torch.zeros(2), [torch.zeros(2)], (torch.zeros(2),), {"x": torch.zeros(2)}], ids=repr
)
def test_plain_batches_move(batch: Any) -> None:
    moved = move_to_device(batch, META)
    assert type(moved) is type(batch)
    assert (
        next(
            iter(moved.values() if isinstance(moved, dict) else [moved] if isinstance(moved, Tensor) else moved)
        ).device
        == META
    )


def test_objects_move_themselves() -> None:
    assert move_to_device([Own()], META)[0].device == META
    stays = Own(in_place=True)
    assert move_to_device(stays, META) is stays
    assert stays.device == META


def test_a_parameter_stays_a_parameter() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))
    assert move_to_device(parameter, CPU) is parameter


def test_apply_replaces_elements_of_a_type() -> None:
    data = {"a": [1, "x", 2.5], "b": Sample(torch.ones(1), name="n")}
    assert apply_to_collection(data, int, lambda number, by: number + by, by=10)["a"] == [11, "x", 2.5]
    assert apply_to_collection(data, str, str.upper)["b"].name == "N"
    assert apply_to_collection(data, bytes, len) is data


@pytest.mark.parametrize(
    ("batch", "size"),
    [
        (torch.zeros(4, 2), 4),
        (torch.tensor(1.0), None),
        ((torch.zeros(4, 2), torch.zeros(4)), 4),
        ([torch.zeros(4), torch.tensor(1.0)], 4),
        ([torch.zeros(4), torch.zeros(3)], None),
        ({"x": torch.zeros(5), "name": ["a", "b"], "n": 3}, 5),
        ([["a"], Sample(torch.zeros(2))], 2),
        ({"x": torch.zeros(5), "y": {"z": torch.zeros(2)}}, None),
        ("text", None),
        ([], None),
        (SimpleNamespace(x=torch.zeros(2)), None),
        (torch.zeros(0, 2), 0),
    ],
)
def test_batch_size_is_known_or_none(batch: Any, size: int | None) -> None:
    assert find_batch_size(batch) == size
