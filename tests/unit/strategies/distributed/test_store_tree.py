"""A value of each rank, combined through a store."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch.distributed as dist

from loopwright.strategies.distributed.store_tree import FAN, StoreTree


def largest(values: Sequence[bytes]) -> str:
    return str(max(map(int, values)))


@pytest.mark.parametrize("size", [1, 2, FAN, FAN + 1, 3 * FAN**2 + 5])
def test_the_last_rank_gets_what_all_have_posted(size: int) -> None:
    store = dist.HashStore()
    values = random.Random(size).sample(range(10 * size), size)
    order = random.Random(1).sample(range(size), size)
    results = [StoreTree(store, "x", size).post(rank, str(values[rank]), largest) for rank in order]
    assert results == [None] * (size - 1) + [str(max(values))]
    assert StoreTree(store, "x", size).missing(most=5) == []


@pytest.mark.parametrize("size", [2, FAN + 1, FAN**2 + 3])
def test_ranks_that_have_not_posted_are_found(size: int) -> None:
    store = dist.HashStore()
    tree = StoreTree(store, "x", size)
    assert tree.missing(most=3) == list(range(min(size, 3)))
    late = sorted({size - 1, size // 2})
    for rank in range(size):
        if rank not in late:
            assert tree.post(rank, "") is None
    assert tree.missing(most=5) == late
