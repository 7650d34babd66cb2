"""Batches made by threads: order, resume, errors, and that they are made ahead."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

import loopwright as lw
from loopwright.data import BatchStream
from loopwright.data.gather import pinned_parts
from loopwright.errors import ConfigError


class Samples(Dataset[Any]):
    """Each sample is its index; the thread that reads it is noted."""

    def __init__(self, size: int = 11, broken: int = -1) -> None:
        self.size, self.broken = size, broken
        self.threads: set[str] = set()
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        self.threads.add(threading.current_thread().name)
        self.read.append(index)
        if index == self.broken:
            raise ValueError("no such image")
        return torch.tensor([index])


def lists(batches: Any) -> list[Any]:
    return [batch.flatten().tolist() for batch in batches]


@pytest.mark.parametrize("arguments", [{}, {"shuffle": True}, {"shuffle": True, "drop_last": True}])
def test_order_and_draws_are_those_of_a_dataloader(arguments: dict[str, Any]) -> None:
    torch.manual_seed(3)
    expected, after = lists(DataLoader(Samples(), batch_size=2, **arguments)), torch.get_rng_state()
    torch.manual_seed(3)
    data = Samples()
    assert lists(lw.ThreadDataLoader(data, batch_size=2, num_threads=3, **arguments)) == expected
    assert torch.equal(torch.get_rng_state(), after)
    assert threading.current_thread().name not in data.threads


def test_samples_without_batches() -> None:
    assert lists(lw.ThreadDataLoader(Samples(3), batch_size=None, num_threads=2)) == [[0], [1], [2]]


def test_batches_are_made_ahead_and_no_further() -> None:
    data = Samples()
    iterator = iter(lw.ThreadDataLoader(data, batch_size=1, num_threads=1, prefetch_batches=3))
    next(iterator)
    iterator._threads.shutdown()  # type: ignore[attr-defined]  # waits for what was submitted
    assert data.read == [0, 1, 2, 3]


@pytest.mark.parametrize("stop", [1, 4])
def test_training_stops_and_resumes_exactly(stop: int) -> None:
    def open_stream() -> BatchStream:
        return BatchStream(lw.ThreadDataLoader(Samples(), batch_size=2, shuffle=True, num_threads=2))

    torch.manual_seed(3)
    expected = lists(DataLoader(Samples(), batch_size=2, shuffle=True))
    torch.manual_seed(3)
    stream = open_stream()
    stream.open(0)
    found = [stream.next_batch() for _ in range(stop)]
    state = stream.state_dict()
    stream.shut_down()
    again = open_stream()
    again.load_state_dict(state)
    again.reopen()
    while again.has_next():
        found.append(again.next_batch())
    assert lists(found) == expected


def test_an_error_names_its_sample_and_ends_the_threads() -> None:
    loader = lw.ThreadDataLoader(Samples(broken=5), batch_size=2, num_threads=2)
    found = []
    iterator = iter(loader)
    with pytest.raises(ValueError, match="no such image") as caught:
        found.extend(iterator)
    assert lists(found) == [[0, 1], [2, 3]]
    assert "sample 5 of Samples" in caught.value.__notes__[0]
    assert list(iterator) == []


class Stream(IterableDataset[Any]):
    """Has no indices."""

    def __iter__(self) -> Any:
        yield 1


class Drawing(Samples):
    """Holds a generator that samples share."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator()


@pytest.mark.parametrize(
    ("dataset", "arguments", "message"),
    [
        (Stream(), {}, "map-style"),
        (Drawing(), {}, "generator"),
        (Samples(), {"num_threads": 0}, "at least 1"),
        (Samples(), {"prefetch_batches": 0}, "at least 1"),
        (Samples(), {"num_workers": 2}, "num_workers=2"),
    ],
)
def test_what_threads_cannot_read_is_refused(dataset: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        lw.ThreadDataLoader(dataset, **arguments)


def test_batches_for_a_cuda_device_are_pinned_in_the_threads() -> None:
    assert pinned_parts(lw.ThreadDataLoader(Samples())) == {"pin_memory": True}
