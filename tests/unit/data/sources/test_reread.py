"""Iterables that are read again up to their position: whether the second reading yields the same."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from loopwright.data.sources.reread import RereadSource
from loopwright.data.stream import BatchStream


class Rows(IterableDataset[torch.Tensor]):
    """Eight rows in an order that a generator draws when iteration begins."""

    def __init__(self, order: Any) -> None:
        self.order = order

    def __iter__(self) -> Iterator[torch.Tensor]:
        numbers = list(range(8))
        self.order.shuffle(numbers)
        return iter(torch.tensor(numbers, dtype=torch.float32))


class OfPackage(Rows):
    """A data set whose position is counted by a loader of its package."""

    def state_dict(self, num_samples: int, from_beginning: bool) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None: ...


def read_again(first: Any, second: Any, count: int) -> list[Any]:
    """Read some batches, go there again with another loader, and return the batches after it."""
    stream = BatchStream(DataLoader(first, batch_size=1))
    stream.open(0)
    for _ in range(count):
        assert stream.has_next()
        stream.next_batch()
    state = stream.state_dict()
    stream.close()
    again = BatchStream(DataLoader(second, batch_size=1))
    again.load_state_dict(state)
    again.reopen()
    rest = []
    while again.has_next():
        rest.append(again.next_batch())
    return rest


@pytest.mark.parametrize("count", [1, 2, 5])
def test_an_order_that_does_not_repeat_is_reported(count: int, caplog: pytest.LogCaptureFixture) -> None:
    read_again(Rows(random.Random(1)), Rows(Reversed()), count)
    assert sum("yields other batches than before the stop" in text for text in caplog.messages) == 1


class Reversed:
    """Rows from the last to the first, which no batch of `random.Random(1)` agrees with."""

    def shuffle(self, numbers: list[int]) -> None:
        numbers.reverse()


@pytest.mark.parametrize("count", [1, 2, 5])
def test_an_order_from_global_generators_repeats_without_a_report(count: int, caplog: pytest.LogCaptureFixture) -> None:
    rest = read_again(Rows(random), Rows(random), count)
    assert len(rest) == 8 - count
    assert not any("other batches" in text for text in caplog.messages)


def test_a_data_set_that_needs_the_loader_of_its_package_is_reported_and_read_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    loader = DataLoader(OfPackage(random), batch_size=1)
    assert isinstance(BatchStream(loader)._source, RereadSource)
    assert "OfPackage keeps its position and its count of epochs only with a loader" in caplog.text
    assert len(read_again(OfPackage(random), OfPackage(random), 3)) == 5
