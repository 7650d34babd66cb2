from __future__ import annotations

import argparse
import collections
import dataclasses
import enum
import pathlib
import types
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from loopwright.checkpoint import require_plain, to_plain


class Number(enum.IntEnum):
    ONE = 1


class Text(str, enum.Enum):
    A = "a"


class Opaque(enum.Enum):
    A = "a"


@dataclasses.dataclass
class Sizes:
    width: int
    path: pathlib.Path


Pair = collections.namedtuple("Pair", "a b")


def same(left: Any, right: Any) -> bool:
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        (True, True),
        (Number.ONE, 1),
        (Text.A, "a"),
        (np.float64(1.5), 1.5),
        (np.float32(0.5), 0.5),
        (np.int64(3), 3),
        (np.bool_(True), True),
        (np.str_("x"), "x"),
        (np.array([1.0, 2.0]), torch.tensor([1.0, 2.0], dtype=torch.float64)),
        (np.arange(4)[::-2], torch.tensor([3, 1])),
        (pathlib.PurePosixPath("a/b"), "a/b"),
        (argparse.Namespace(a=np.int32(1)), {"a": 1}),
        (types.SimpleNamespace(a=1), {"a": 1}),
        (Sizes(2, pathlib.PurePosixPath("c")), {"width": 2, "path": "c"}),
        (collections.defaultdict(list, a=[1]), {"a": [1]}),
        (collections.OrderedDict(a=1), collections.OrderedDict(a=1)),
        (collections.Counter("aa"), collections.Counter("aa")),
        (types.MappingProxyType({"a": 1}), {"a": 1}),
        (Pair(1, 2), (1, 2)),
        (collections.deque([1, 2]), [1, 2]),
        (frozenset([1]), {1}),
        (torch.Size([1]), torch.Size([1])),
        ({Number.ONE: {"x": (Text.A,)}}, {1: {"x": ("a",)}}),
    ],
)
def test_harmless_values_become_plain_ones(value: object, expected: object) -> None:
    plain, dropped = to_plain(value)
    assert same(plain, expected)
    assert dropped == []
    require_plain(plain)


def test_omegaconf_containers_are_resolved() -> None:
    config = OmegaConf.create({"a": 1, "b": "${a}", "c": [1, "${b}"]})
    assert same(
        to_plain({"config": config, "list": config.c}), ({"config": {"a": 1, "b": 1, "c": [1, 1]}, "list": [1, 1]}, [])
    )


def test_an_interpolation_that_leads_nowhere_keeps_its_text() -> None:
    plain, dropped = to_plain(OmegaConf.create({"b": "${nowhere}"}))
    assert plain == {"b": "${nowhere}"}
    assert dropped == []


def test_what_cannot_be_converted_is_named_and_left_out() -> None:
    value = {
        "lr": 0.1,
        "net": torch.nn.Linear(1, 1),
        "opt": {"fn": len, "kind": Opaque.A, "ok": 1},
        "layers": [1, object()],
        "when": np.datetime64("2020-01-01"),
        "texts": np.array(["a"]),
        "big": 2**3000,
    }
    plain, dropped = to_plain(value)
    assert plain == {"lr": 0.1, "opt": {"ok": 1}}
    assert dropped == ["net", "opt['fn']", "opt['kind']", "layers[1]", "when", "texts", "big"]


def test_values_that_hold_themselves_are_left_out() -> None:
    value: dict[str, Any] = {"a": 1}
    value["self"] = value
    assert to_plain(value) == ({"a": 1}, ["self"])


def test_nothing_convertible_gives_none() -> None:
    assert to_plain(len) == (None, ["builtin_function_or_method"])


def test_the_original_is_not_changed_and_arrays_are_copied() -> None:
    array = np.zeros(2)
    value = {"a": array, "p": pathlib.Path("x")}
    plain, _ = to_plain(value)
    array[0] = 1
    assert plain["a"].tolist() == [0, 0]
    assert isinstance(value["p"], pathlib.Path)


def test_sets_that_would_hold_sets_are_left_out() -> None:
    assert to_plain({"a": {frozenset([1])}, "b": {frozenset([1]): 2}}) == ({"b": {}}, ["a", "b[frozenset({1})]"])
