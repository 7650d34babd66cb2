"""Several loaders read as one."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from loopwright.data import CombinedLoader, is_collection
from loopwright.errors import ConfigError, DataError, ModuleError

TWO, THREE = ["a0", "a1"], ["b0", "b1", "b2"]


def loaders() -> dict[str, Any]:
    return {"a": DataLoader(TWO, batch_size=None), "b": DataLoader(THREE, batch_size=None)}


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("min_size", [("a0", "b0"), ("a1", "b1")]),
        ("max_size_cycle", [("a0", "b0"), ("a1", "b1"), ("a0", "b2")]),
        ("max_size", [("a0", "b0"), ("a1", "b1"), (None, "b2")]),
    ],
)
def test_parallel_modes(mode: str, expected: list[Any]) -> None:
    combined = CombinedLoader(loaders(), mode)
    for _ in range(2):
        got = list(combined)
        assert got == [({"a": a, "b": b}, number, 0) for number, (a, b) in enumerate(expected)]
        assert len(combined) == len(expected)


def test_sequential_goes_through_one_after_the_other() -> None:
    combined = CombinedLoader(loaders(), "sequential")
    assert list(combined) == [("a0", 0, 0), ("a1", 1, 0), ("b0", 0, 1), ("b1", 1, 1), ("b2", 2, 1)]
    assert len(combined) == 5


@pytest.mark.parametrize(
    ("mode", "limits", "count"),
    [
        ("sequential", 1, 2),
        ("sequential", [0, 2], 2),
        ("sequential", [None, 1], 3),
        ("min_size", 1, 1),
        ("max_size", [None, 1], 2),
        ("max_size_cycle", 2, 2),
    ],
)
def test_limits_hold_for_each_loader(mode: str, limits: Any, count: int) -> None:
    combined = CombinedLoader(loaders(), mode)
    combined.limits = limits
    assert len(list(combined)) == len(combined) == count


def test_nested_collections_keep_their_shape() -> None:
    nested = [range(2), {"x": (range(3), DataLoader(THREE, batch_size=None))}]
    batch, _, _ = next(iter(CombinedLoader(nested)))
    assert batch == [0, {"x": (0, "b0")}]


def test_one_loader_is_a_collection_too() -> None:
    assert [batch for batch, _, _ in CombinedLoader(range(2), "sequential")] == [0, 1]


def test_flattened_may_be_set() -> None:
    combined = CombinedLoader({"a": range(2), "b": [range(3)]})
    assert combined.flattened == [range(2), range(3)]
    combined.flattened = [range(5), range(6)]
    assert combined.iterables == {"a": range(5), "b": [range(6)]}
    with pytest.raises(ConfigError, match="Expected 2 loaders in flattened"):
        combined.flattened = [range(1)]


def test_samplers_come_in_the_collections_shape() -> None:
    data = DataLoader(TWO, batch_size=2)
    combined = CombinedLoader({"a": data, "b": range(2)})
    assert combined.sampler == {"a": data.sampler, "b": None}
    assert combined.batch_sampler == {"a": data.batch_sampler, "b": None}


def test_state_is_that_of_the_loaders_that_have_one() -> None:
    class Saves(list[int]):
        state = 1

        def state_dict(self) -> dict[str, int]:
            return {"state": self.state}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.state = state["state"]

    first = Saves([1])
    combined = CombinedLoader({"a": range(2), "b": first})
    assert combined.state_dict() == [{"state": 1}]
    combined.load_state_dict([{"state": 5}])
    assert first.state == 5
    with pytest.raises(DataError, match="1 loaders with a state, but 2"):
        combined.load_state_dict([{}, {}])


def test_reset_ends_persistent_workers() -> None:
    data = DataLoader(TWO, batch_size=None, num_workers=1, persistent_workers=True)
    combined = CombinedLoader([data])
    assert len(list(combined)) == 2
    combined.reset()
    assert data._iterator is None
    with pytest.raises(DataError):
        len(combined)


def test_errors_name_what_is_wrong() -> None:
    with pytest.raises(ConfigError, match="did you mean 'max_size'"):
        CombinedLoader([range(2)], "maxsize")
    with pytest.raises(ModuleError, match="can be iterated in a CombinedLoader, got int"):
        CombinedLoader({"a": 3})
    with pytest.raises(DataError, match="only once it is iterated"):
        len(CombinedLoader([range(2)]))
    combined = CombinedLoader([range(2), map(str, range(2))])
    iter(combined)
    with pytest.raises(NotImplementedError, match="map has none"):
        len(combined)
    with pytest.raises(ConfigError, match="Expected 2 numbers in limits .*got 3"):
        combined.limits = [1, 2, 3]


@pytest.mark.parametrize("mode", ["min_size", "max_size_cycle"])
def test_a_loader_without_batches_is_named_unless_its_limit_leaves_none(mode: str) -> None:
    with pytest.raises(DataError, match=r"Loader 1 of the collection \(list\) yields no batches"):
        list(CombinedLoader({"a": range(2), "b": []}, mode))
    limited = CombinedLoader([range(2), range(3)], mode)
    limited.limits = [2, 0]
    assert list(limited) == []
    spent = CombinedLoader([range(3), map(str, range(2))], mode)
    if mode == "min_size":
        assert sum(1 for _ in spent) == 2
    else:
        with pytest.raises(DataError, match=r"Loader 1 of the collection \(map\) yields no batches when reread"):
            for _ in spent:
                pass


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ([range(2), range(3)], True),
        ({"a": [torch.zeros(1)]}, True),
        ([range(2), [torch.zeros(1)]], True),
        ([torch.zeros(1), torch.zeros(1)], False),
        ([(torch.zeros(1), torch.zeros(1))], False),
        ([{"x": torch.zeros(1)}], False),
        (["a", "b"], False),
        ([1, 2], False),
        ([], False),
        (range(2), False),
    ],
)
def test_collections_of_loaders_differ_from_lists_of_batches(data: Any, expected: bool) -> None:
    assert is_collection(data) is expected


def test_the_next_triple_is_that_of_the_iteration_begun_last() -> None:
    loader = CombinedLoader({"a": [1, 2, 3], "b": [4, 5]})
    with pytest.raises(StopIteration):
        next(loader)
    for mode in ("min_size", "sequential"):
        loader = CombinedLoader({"a": [1, 2, 3], "b": [4, 5]}, mode)
        first = iter(loader)
        assert next(first) == next(iter(loader))
        assert next(loader) == next(first)
        copied = copy.deepcopy(loader)
        with pytest.raises(StopIteration):
            next(copied)
        loader.reset()
        with pytest.raises(StopIteration):
            next(loader)
