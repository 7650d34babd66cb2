"""Several ranks in one process: each has its own loader, stream and random numbers, and they take turns."""

from __future__ import annotations

import io
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from loopwright.data import NO_BATCH, BatchStream, Shard, capture_rng, merge_states


def seed(value: int = 0) -> None:
    random.seed(value)
    np.random.seed(value)
    torch.manual_seed(value)


def through_disk(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


class Numbers(Dataset):
    """Each sample is its index; notes what was read."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.reads: list[int] = []

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        self.reads.append(index)
        return index


class Ranks:
    """The streams of all ranks, each within its own global random number generators.

    Args:
        make: Makes the loader, on each rank anew.
        size: Number of ranks.
        limit, uneven, splits: Of the streams.
        first_seed: Rank 0 is seeded with it, the others differently.
        draws: Whether a step of the training draws random numbers.
    """

    def __init__(
        self,
        make: Callable[[], Any],
        size: int,
        *,
        uneven: str = "stop_all",
        splits: bool = True,
        limit: int | float | None = None,
        first_seed: int = 0,
        draws: bool = True,
    ) -> None:
        self.size = size
        self.draws = draws
        self.rngs: list[Any] = []
        self.streams: list[BatchStream] = []
        for rank in range(size):
            seed(first_seed + 1000 * rank)
            shard = Shard(rank, size, uneven, splits)
            self.streams.append(BatchStream(make(), limit, shard=shard))
            self.rngs.append(look())

    def on_each(self, function: Callable[[BatchStream], Any]) -> list[Any]:
        """Call a function with each rank's stream within its generators; return the results."""
        results = []
        for rank, stream in enumerate(self.streams):
            go_to(self.rngs[rank])
            results.append(function(stream))
            self.rngs[rank] = look()
        return results

    def same(self, function: Callable[[BatchStream], Any]) -> Any:
        """Return what is equal on all ranks."""
        results = self.on_each(function)
        assert all(result == results[0] for result in results), results
        return results[0]

    def open(self, epoch: int) -> None:
        go_to(self.rngs[0])
        shared = capture_rng()
        self.on_each(lambda stream: stream.open(epoch, shared))

    def round(self) -> list[Any]:
        """Let each rank train on one batch; return the batches."""

        def step(stream: BatchStream) -> Any:
            batch = stream.next_batch()
            if self.draws:
                draw()
            return batch if batch is NO_BATCH else plain(batch)

        return self.on_each(step)

    def rounds(self, most: int | None = None) -> list[list[Any]]:
        """Return the batches of all ranks, round by round, until the epoch ends; counts are checked on the way."""
        given: list[list[Any]] = []
        while (most is None or len(given) < most) and self.same(lambda stream: stream.has_next()):
            left = self.same(lambda stream: stream.remaining(3))
            assert left > 0
            position = self.same(lambda stream: stream.position)
            given.append(self.round())
            assert self.same(lambda stream: stream.position) == position + 1
        if most is None:
            assert self.same(lambda stream: stream.remaining(3)) == 0
        return given

    def epoch(self, number: int) -> list[list[Any]]:
        self.open(number)
        return self.rounds()

    def state(self, position: int | None = None) -> Any:
        states = self.on_each(lambda stream: stream.state_dict(position))
        if not states[0].get("is_per_rank"):
            first = plain(states[0])
            assert all(plain(state) == first for state in states)
        return through_disk(merge_states(states))

    def resume(self, state: Any) -> None:
        def enter(stream: BatchStream) -> None:
            stream.load_state_dict(state)
            if state["is_open"]:
                rng = look()
                stream.reopen()
                go_to(rng)

        self.on_each(enter)


def look() -> tuple[Any, ...]:
    """Return where the global generators are, quicker than `capture_rng`."""
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def go_to(state: tuple[Any, ...]) -> None:
    """Put the global generators where `look` saw them."""
    random.setstate(state[0])
    np.random.set_state(state[1])
    torch.set_rng_state(state[2])


def draw() -> None:
    """Stand for dropout and whatever else a training step draws."""
    torch.rand(1)
    random.random()
    np.random.rand()


def plain(value: Any) -> Any:
    """Return tensors as lists, so that values can be compared."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


def deal(rounds: list[list[Any]]) -> list[Any]:
    """Return the batches in the loader's order."""
    return [batch for given in rounds for batch in given]


def by_hand(make: Callable[[], Any], epochs: int = 1, *, draws: bool = True) -> Iterator[list[Any]]:
    """Yield the batches of each epoch of a loop that one process would run."""
    seed()
    loader = make()
    for epoch in range(epochs):
        for part in (loader, getattr(loader, "sampler", None)):
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)
        batches = []
        for batch in loader:
            batches.append(plain(batch))
            if draws:
                draw()
        yield batches
