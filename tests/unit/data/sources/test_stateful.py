"""Loaders with state_dict and load_state_dict, of which some know no position."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from loopwright.data.rng import capture_rng, restore_rng
from loopwright.data.sources.stateful import is_stateful
from loopwright.data.stream import BatchStream
from loopwright.errors import DataError


class CountsPasses:
    """A loader whose state is the number of its passes; it draws an order for each."""

    def __init__(self, *, is_sized: bool, counts_at_end: bool) -> None:
        self.passes = 0
        self._counts_at_end = counts_at_end
        if is_sized:
            self.__class__ = _Sized

    def __iter__(self) -> Iterator[float]:
        self.passes += not self._counts_at_end
        for number in torch.randperm(5).tolist():
            yield self.passes + number / 10
        self.passes += self._counts_at_end

    def state_dict(self) -> dict[str, int]:
        return {"passes": self.passes}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.passes = state["passes"]


class _Sized(CountsPasses):
    def __len__(self) -> int:
        return 5


def read(stream: BatchStream, count: int) -> list[Any]:
    return [stream.next_batch() for _ in range(count) if stream.has_next()]


@pytest.mark.parametrize("counts_at_end", [False, True])
@pytest.mark.parametrize("is_sized", [True, False])
@pytest.mark.parametrize("position", [2, 3, 5])
def test_a_state_without_a_position_is_completed_by_reading_again(
    position: int, is_sized: bool, counts_at_end: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def make() -> BatchStream:
        return BatchStream(CountsPasses(is_sized=is_sized, counts_at_end=counts_at_end))

    torch.manual_seed(0)
    stream = make()
    stream.open(0)
    read(stream, 6)
    stream.close()
    stream.open(1)
    read(stream, position)
    state, rng = stream.state_dict(), capture_rng()
    rest = read(stream, 6)
    stream.close()
    stream.open(2)
    rest += read(stream, 6)

    torch.manual_seed(1)
    stream = make()
    stream.load_state_dict(state)
    stream.reopen()
    restore_rng(rng)
    resumed = read(stream, 6)
    stream.close()
    stream.open(2)
    assert resumed + read(stream, 6) == rest
    assert len(rest) == 10 - position
    assert (f"reading {position} batches again" in caplog.text) is (position < 5)


def test_a_pass_that_was_left_is_not_continued() -> None:
    stream = BatchStream(CountsPasses(is_sized=True, counts_at_end=False))
    stream.open(0)
    read(stream, 3)
    stream.close()
    state = stream.state_dict()
    stream = BatchStream(CountsPasses(is_sized=True, counts_at_end=False))
    stream.load_state_dict(state)
    stream.open(1)
    assert [int(batch) for batch in read(stream, 6)] == [2] * 5


class IgnoresPosition(list[int]):
    """A loader that saves its position and does not go there."""

    given = 0

    def __iter__(self) -> Iterator[int]:
        for self.given, batch in enumerate(super().__iter__(), 1):
            yield batch

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


def test_a_loader_that_begins_again_after_it_was_loaded_is_an_error() -> None:
    stream = BatchStream(IgnoresPosition(range(4)))
    stream.open(0)
    read(stream, 2)
    state = stream.state_dict()
    stream = BatchStream(IgnoresPosition(range(4)))
    stream.load_state_dict(state)
    stream.reopen()
    with pytest.raises(DataError, match="got its first batches again"):
        read(stream, 2)
    counted = BatchStream(CountsPasses(is_sized=True, counts_at_end=False))
    counted.open(0)
    read(counted, 1)  # too early to know
    state = counted.state_dict()
    counted = BatchStream(CountsPasses(is_sized=True, counts_at_end=False))
    counted.load_state_dict(state)
    counted.reopen()
    with pytest.raises(DataError, match="got its first batches again"):
        read(counted, 2)


class _Compiled(list[torch.Tensor]):
    """A loader whose methods are compiled and have no signature."""

    state_dict = load_state_dict = dict


class _NeedsPosition(_Compiled):
    def state_dict(self, num_samples: int) -> dict[str, int]:  # type: ignore[override]
        return {}


def test_methods_without_a_signature_count_as_those_of_a_loader_with_a_state() -> None:
    assert is_stateful(_Compiled())
    assert not is_stateful(_NeedsPosition())
