"""What a batch costs before the model sees it: torch's DataLoader, and what a run reads in its place; for run.py.

`python benchmarks/loading.py 200 5` prints the same numbers as JSON.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from loopwright.data import BatchStream

# Any in this file: batches.

SHAPES = (("small samples", 64, (32,)), ("large batches", 1024, (32,)), ("images", 64, (3, 32, 32)))


def measure_loading(*, num_batches: int, rounds: int) -> list[dict[str, Any]]:
    """Return microseconds of CPU time per batch of a shuffled loader, both sides in turns; medians over the rounds."""
    rows = []
    for name, batch_size, shape in SHAPES:
        count = min(num_batches * batch_size, 20_000)
        dataset = TensorDataset(torch.randn(count, *shape), torch.randint(0, 10, (count,)))

        def make(dataset: TensorDataset = dataset, batch_size: int = batch_size) -> DataLoader[Any]:
            return DataLoader(dataset, batch_size=batch_size, shuffle=True, drop_last=True)

        found: dict[str, list[float]] = {"torch": [], "run": []}
        for number in range(rounds + 1):
            for side, batches in (("torch", lambda: iter(make())), ("run", lambda: _stream(make()))):
                found[side].append(_cost_us(batches, num_batches)) if number else _cost_us(batches, 3)
        rows.append(
            {
                "name": f"{name}: {batch_size} x {list(shape)}",
                **{f"{side}_us": statistics.median(values) for side, values in found.items()},
                "equal": _are_equal(make),
            }
        )
    return rows


def _stream(loader: DataLoader[Any]) -> Iterator[Any]:
    stream = BatchStream(loader)
    stream.open(0)
    while stream.has_next():
        yield stream.next_batch()


def _cost_us(batches: Callable[[], Iterator[Any]], count: int) -> float:
    torch.manual_seed(0)
    number, spent_s = 0, 0.0
    while number < count:
        iterator = batches()
        next(iterator)  # draws the order
        began_s = time.thread_time()
        for _ in itertools.islice(iterator, count - number):
            number += 1
        spent_s += time.thread_time() - began_s
    return 1e6 * spent_s / number


def _are_equal(make: Callable[[], DataLoader[Any]]) -> bool:
    torch.manual_seed(0)
    expected = list(itertools.islice(make(), 5))
    torch.manual_seed(0)
    found = list(itertools.islice(_stream(make()), 5))
    return all(
        torch.equal(x, y) for one, other in zip(expected, found, strict=True) for x, y in zip(one, other, strict=True)
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(measure_loading(num_batches=int(sys.argv[1]), rounds=int(sys.argv[2]))))
