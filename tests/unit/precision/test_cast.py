from __future__ import annotations

from collections import OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass
from types import MappingProxyType

import torch

from loopwright.precision.base import cast_floats

Pair = namedtuple("Pair", ["a", "b"])


@dataclass(frozen=True)
class Batch:
    x: torch.Tensor
    name: str


def test_only_real_floating_point_tensors_are_cast() -> None:
    data = {
        "f": torch.ones(2),
        "i": torch.ones(2, dtype=torch.int64),
        "c": torch.ones(2, dtype=torch.complex64),
        "s": "x",
    }
    result = cast_floats(data, torch.float64)
    assert result["f"].dtype is torch.float64
    assert result["i"] is data["i"]
    assert result["c"] is data["c"]
    assert result["s"] == "x"
    assert data["f"].dtype is torch.float32


def test_containers_keep_their_type() -> None:
    one = torch.ones(1)
    assert isinstance(cast_floats([one], torch.float64), list)
    assert isinstance(cast_floats((one,), torch.float64), tuple)
    pair = cast_floats(Pair(one, 2), torch.float64)
    assert isinstance(pair, Pair)
    assert pair.a.dtype is torch.float64
    assert isinstance(cast_floats(OrderedDict(a=one), torch.float64), OrderedDict)
    grouped = cast_floats(defaultdict(list, a=one), torch.float64)
    assert grouped["missing"] == []
    batch = cast_floats(Batch(one, "n"), torch.float64)
    assert isinstance(batch, Batch)
    assert batch.x.dtype is torch.float64
    assert cast_floats(MappingProxyType({"a": one}), torch.float64)["a"].dtype is torch.float64


def test_what_does_not_change_is_not_copied() -> None:
    one = torch.ones(1)
    for data in ([one, 1], (one,), {"a": one}, Pair(one, one), Batch(one, "n"), "text", None):
        assert cast_floats(data, torch.float32) is data


def test_gradients_flow_through() -> None:
    x = torch.ones(2, requires_grad=True)
    cast_floats([x], torch.float64)[0].sum().backward()
    assert x.grad is not None
