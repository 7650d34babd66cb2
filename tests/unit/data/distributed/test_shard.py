"""data/distributed/shard.py: which batches are whose, and what a checkpoint keeps for each rank."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, SequentialSampler

from loopwright.data import NO_BATCH, Shard, is_rank_aware, merge_states
from loopwright.data.distributed.shard import UNEVEN, interleave
from loopwright.errors import ConfigError


@given(batches=st.integers(0, 50), size=st.integers(1, 9))
def test_the_shards_of_all_ranks_are_the_full_data_without_overlap(batches: int, size: int) -> None:
    shares = [[number for number in Shard(rank, size).numbers(batches) if number < batches] for rank in range(size)]
    assert interleave(shares) == list(range(batches))
    assert max(map(len, shares)) == Shard(0, size, "cycle").count_global_batches(batches)
    assert min(map(len, shares)) == Shard(0, size, "stop_all").count_global_batches(batches)


def test_nothing_interleaves_to_nothing() -> None:
    assert interleave([]) == interleave([[], []]) == []


def test_by_default_one_process_reads_everything() -> None:
    assert (Shard().rank, Shard().size, Shard().uneven, Shard().splits) == (0, 1, "stop_all", True)
    assert Shard() == Shard(0, 1)
    assert Shard(1, 2).with_policy("cycle") == Shard(1, 2, "cycle")


def test_a_policy_that_there_is_not() -> None:
    with pytest.raises(ConfigError, match=r"uneven='cycel'.*did you mean.*cycle") as caught:
        Shard(0, 2, "cycel")
    assert all(name in str(caught.value) for name in UNEVEN)


def test_there_is_one_no_batch() -> None:
    assert pickle.loads(pickle.dumps(NO_BATCH)) is NO_BATCH
    assert copy.deepcopy(NO_BATCH) is NO_BATCH
    assert repr(NO_BATCH) == "NO_BATCH"


class Conventional:
    """A sampler with the attributes that torch's has."""

    rank = 1
    num_replicas = 2

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[0], [1]])


def test_samplers_that_know_their_rank_are_found_at_any_depth() -> None:
    data = list(range(8))
    own = DistributedSampler(data, 2, 1)  # type: ignore[arg-type]
    aware: list[Any] = [
        DataLoader(data, sampler=own),  # type: ignore[arg-type]
        DataLoader(data, batch_sampler=BatchSampler(own, 2, False)),  # type: ignore[arg-type]
        DataLoader(data, batch_sampler=Conventional()),  # type: ignore[arg-type]
    ]
    assert all(map(is_rank_aware, aware))
    unaware: list[Any] = [
        DataLoader(data),  # type: ignore[arg-type]
        DataLoader(data, shuffle=True),  # type: ignore[arg-type]
        DataLoader(data, batch_sampler=BatchSampler(RandomSampler(data), 2, False)),  # type: ignore[arg-type]
        SequentialSampler(data),
        data,
        {"a": data},
        None,
    ]
    assert not any(map(is_rank_aware, unaware))


def test_states_that_are_equal_on_all_ranks_are_kept_once() -> None:
    state = {"kind": "indexed", "is_per_rank": False, "position": 3}
    assert merge_states([state, state]) is state
    assert merge_states([{"kind": "replay", "is_per_rank": True}]) == {"kind": "replay", "is_per_rank": True}
