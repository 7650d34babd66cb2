"""data/distributed/evaluation.py: over all ranks, evaluation reads every sample exactly once, and nothing is padded."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sharing import Numbers, plain, seed
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, RandomSampler, Sampler

from loopwright.data import CombinedLoader, Shard, capture_rng, count_eval_rounds, in_loader_order, shard_eval
from loopwright.data.distributed.evaluation import EvalShard
from loopwright.data.persistent_workers import PersistentWorkersLoader, with_persistent_workers


def on_all(make: Callable[[], Any], size: int, passes: int = 1, *, shares: bool = True) -> list[list[list[Any]]]:
    """Return what each rank reads in each pass; each rank has other random numbers."""
    results: list[list[list[Any]]] = [[] for _ in range(size)]
    rngs = []
    for rank in range(size):
        seed(rank)
        rngs.append(capture_rng())
    shared: list[Any] = []

    def make_share(rank: int) -> Callable[[Any], Any]:
        number = iter(range(99))

        def share(value: Any) -> Any:
            if rank == 0:
                shared.append(value)
            return shared[next(number)]

        return share

    from loopwright.data import restore_rng

    for rank in range(size):
        restore_rng(rngs[rank])
        loader = shard_eval(make(), Shard(rank, size), share=make_share(rank) if shares else None)
        for _ in range(passes):
            results[rank].append([plain(batch) for batch in loader])
        if hasattr(loader, "shut_down"):
            loader.shut_down()
        assert len(loader) == len(results[rank][0])
    return results


class AllTheTime(Sampler):
    """Draws whenever it is asked."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[int]:
        order = list(range(self.size))
        while order:
            yield order.pop(random.randrange(len(order)))

    def __len__(self) -> int:
        return self.size


MAKERS: dict[str, Callable[[int, int], Any]] = {
    "in order": lambda n, b: DataLoader(Numbers(n), batch_size=b),
    "shuffle": lambda n, b: DataLoader(Numbers(n), batch_size=b, shuffle=True),
    "drop_last": lambda n, b: DataLoader(Numbers(n), batch_size=b, drop_last=True),
    "no batching": lambda n, b: DataLoader(Numbers(n), batch_size=None),
    "batch sampler": lambda n, b: DataLoader(
        Numbers(n), batch_sampler=BatchSampler(RandomSampler(Numbers(n)), b, False)
    ),
    "all the time": lambda n, b: DataLoader(Numbers(n), batch_size=b, sampler=AllTheTime(n)),
    "list": lambda n, b: [list(range(k, min(k + b, n))) for k in range(0, n, b)],
}


@given(
    n=st.integers(0, 30),
    batch_size=st.integers(1, 5),
    size=st.integers(2, 7),
    name=st.sampled_from(sorted(MAKERS)),
    shares=st.booleans(),
)
@settings(max_examples=50, deadline=None)
def test_every_sample_is_read_once(n: int, batch_size: int, size: int, name: str, shares: bool) -> None:
    if not n and name in ("shuffle", "batch sampler"):
        return  # torch has no such sampler
    results = on_all(lambda: MAKERS[name](n, batch_size), size, passes=2, shares=shares)
    used = n // batch_size * batch_size if name == "drop_last" else n
    for number in range(2):
        batches = [batch for parts in results for batch in parts[number]]
        samples = batches if name == "no batching" else [index for batch in batches for index in batch]
        assert sorted(samples) == list(range(used))
    if name not in ("shuffle", "batch sampler", "all the time"):
        whole = [plain(batch) for batch in MAKERS[name](n, batch_size)]
        loader = shard_eval(MAKERS[name](n, batch_size), Shard(1, size))
        assert in_loader_order(loader, [parts[0] for parts in results]) == whole
        rounds = count_eval_rounds(loader)
        assert rounds == max(len(parts[0]) for parts in results) == -(-len(whole) // size)
        assert [whole[k] for k in loader.global_batch_indices(len(loader))] == results[1][0]


def test_two_passes_over_a_shuffled_loader_differ() -> None:
    for shares in (True, False):
        results = on_all(lambda: MAKERS["shuffle"](20, 2), 2, passes=2, shares=shares)
        assert results[0][0] != results[0][1]


def test_rank_0_reads_what_one_process_reads_and_draws_as_it_does() -> None:
    seed()
    loader = MAKERS["shuffle"](20, 2)
    whole = [[plain(batch) for batch in loader] for _ in range(2)]
    after = torch.rand(1)
    results = on_all(lambda: MAKERS["shuffle"](20, 2), 2, passes=2)
    assert [batch for pair in zip(results[0][0], results[1][0], strict=True) for batch in pair] == whole[0]
    assert [batch for pair in zip(results[0][1], results[1][1], strict=True) for batch in pair] == whole[1]
    seed()
    shared = shard_eval(loader, Shard(0, 2), share=lambda value: value)
    for _ in range(2):
        list(shared)
    assert torch.equal(torch.rand(1), after)


class Noise(Dataset):
    def __init__(self) -> None:
        self.reads = 0

    def __len__(self) -> int:
        return 7

    def __getitem__(self, index: int) -> Any:
        return index + torch.rand((), dtype=torch.float64)


@pytest.mark.parametrize("shuffle", [True, False])
def test_noise_in_workers_that_persist_does_not_depend_on_the_number_of_ranks(shuffle: bool) -> None:
    def make() -> Any:
        return DataLoader(Noise(), batch_size=2, num_workers=1, persistent_workers=True, shuffle=shuffle)

    seed()
    alone = with_persistent_workers(make())
    whole = [[plain(batch) for batch in alone] for _ in range(2)]
    alone.shut_down()
    results = on_all(make, 3, passes=2)
    for number in range(2):
        loader = shard_eval([], Shard(0, 3))
        assert in_loader_order(loader, [parts[number] for parts in results]) == whole[number]


def test_workers_end_where_a_rank_has_nothing() -> None:
    results = on_all(lambda: DataLoader(Numbers(2), batch_size=2, num_workers=1), 2)
    assert results == [[[[0, 1]]], [[]]]


def test_one_process_reads_the_loader_itself() -> None:
    loader = MAKERS["shuffle"](5, 2)
    assert shard_eval(loader, Shard()) is loader
    persistent = DataLoader(Noise(), num_workers=1, persistent_workers=True)
    assert isinstance(shard_eval(persistent, Shard()), PersistentWorkersLoader)
    assert shard_eval(loader, Shard(1, 2, splits=False)) is loader


def test_data_that_cannot_be_sharded_is_not_changed() -> None:
    class Iterable:
        def __iter__(self) -> Iterator[int]:
            return iter(range(3))

    data = Numbers(8)
    for loader in (Iterable(), DataLoader(data, sampler=DistributedSampler(data, 2, 0))):
        assert shard_eval(loader, Shard(1, 2)) is loader
    assert in_loader_order(Iterable(), [[0, 1], [2]]) == [0, 1, 2]
    assert count_eval_rounds(Iterable()) is None


def test_the_users_loader_is_left_alone() -> None:
    loader = MAKERS["shuffle"](8, 2)
    before = dict(vars(loader))
    shared = shard_eval(loader, Shard(1, 2))
    list(shared)
    assert vars(loader) == before
    assert isinstance(shared, EvalShard)
    assert (shared.loader, shared.batch_size, shared.dataset) == (loader, 2, loader.dataset)


def test_a_loader_that_was_made_steady_can_be_shared() -> None:
    loader = with_persistent_workers(DataLoader(Noise(), num_workers=1, persistent_workers=True))
    shared = shard_eval(loader, Shard(1, 2))
    assert isinstance(shared, EvalShard)
    assert len(shared) == 3


@pytest.mark.parametrize("mode", ["min_size", "max_size", "max_size_cycle", "sequential"])
@pytest.mark.parametrize("counts", [(10, 4), (10, 1), (3, 7), (1, 1)])
@pytest.mark.parametrize("size", [2, 3])
def test_a_combined_loader_is_shared_by_its_members(mode: str, counts: tuple[int, int], size: int) -> None:
    def make() -> CombinedLoader:
        return CombinedLoader([DataLoader(Numbers(count), batch_size=None) for count in counts], mode)

    whole = [item[0] for item in make()]
    seen: list[list[Any]] = []
    for rank in range(size):
        shared = shard_eval(make(), Shard(rank, size))
        seen.append([item[0] for item in shared])
        rounds = count_eval_rounds(shared)
    if mode == "sequential":
        assert sorted(item for items in seen for item in items) == sorted(whole)
        return
    assert rounds == max(map(len, seen))
    for member, count in enumerate(counts):
        read = [item[member] for items in seen for item in items if item[member] is not None]
        if mode == "min_size":
            assert sorted(read) == list(range(min(counts)))
        elif mode == "max_size" or count == max(counts):
            assert sorted(read) == list(range(count))
        else:
            assert set(read) <= set(range(count))


def test_limits_of_a_combined_loader_are_kept() -> None:
    combined = CombinedLoader([DataLoader(Numbers(10)), DataLoader(Numbers(8))], "sequential")
    combined.limits = [2, None]
    shared = shard_eval(combined, Shard(0, 2))
    assert count_eval_rounds(shared) == 2 + 4
    assert len(list(shared)) == 6
