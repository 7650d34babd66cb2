"""One process's shard of an evaluation loader: every sample is read once, by one process, without padding.

Processes may have different numbers of batches, or none: a loop over a shard must not communicate per batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import Protocol, TypeVar, cast

from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from ...protocols import AnyDataset, AnyLoaders, AnyOutput, AnySampler, Batch, Loaders, StateDict, StepOutput
from ..combined import CombinedLoader
from ..gather import gathering_parts
from ..limit import find_length
from ..persistent_workers import PersistentWorkersLoader, with_persistent_workers
from ..rng import KINDS, RngStream, capture_rng, derive_key, restore_rng
from ..sources.combined import combined_length
from ..sources.indexed import is_indexed
from ..sources.stateful import is_stateful
from ..tree import change_loader, map_loaders
from ..worker import SeedingDataset, with_indices
from .indexed import ShardedIndexStream, borrowed_rng
from .iterable import EvalIterableShard, is_sharded_iterable, of_rank
from .shard import Shard, interleave, is_rank_aware

T = TypeVar("T")


class Share(Protocol):
    """A function that returns the object of rank 0 on all ranks."""

    def __call__(self, obj: T, /) -> T:
        """Return it; called by all ranks."""
        ...


def shard_eval(loader: Loaders, shard: Shard, *, share: Share | None = None) -> AnyLoaders:
    """Return this process's share of an evaluation loader.

    Of a DataLoader with a map-style data set or a `ShardedIterable`, and of a list or tuple of batches, process `rank`
    reads the batches `rank`, `rank + size` and so on; of a `CombinedLoader`, those of its members. Anything else, and
    what knows its rank by itself, is returned as `with_persistent_workers` returns it: each process reads it as it is.

    Args:
        loader: One loader, or a `CombinedLoader`.
        shard: Its policy does not matter here.
        share: Returns rank 0's object on all ranks; called at the beginning of a pass over a loader whose sampler draws
            random numbers, by all ranks. None, and for members of a `CombinedLoader`: such samplers draw from random
            numbers that depend on the number of the pass only.
    """
    if shard.size == 1 or not shard.splits:
        return loader if isinstance(loader, CombinedLoader) else with_persistent_workers(loader)
    if isinstance(loader, CombinedLoader):
        return _share_combined(loader, shard)
    if isinstance(loader, PersistentWorkersLoader):
        loader = loader.loader
    if is_sharded_iterable(loader):
        return EvalIterableShard(loader, shard)
    if hasattr(loader, "dataset"):
        loader = of_rank(loader, shard)
    if is_rank_aware(loader) or is_stateful(loader):
        return with_persistent_workers(loader)
    if is_indexed(loader):
        return EvalShard(loader, shard, share)
    return EvalListShard(loader, shard) if isinstance(loader, (list, tuple)) else with_persistent_workers(loader)


def _share_combined(loader: CombinedLoader, shard: Shard) -> CombinedLoader:
    lengths = [find_length(one) for one in loader.flattened]
    longest = max((math.inf if length is None else length for length in lengths), default=0)

    def share_one(one: Loaders) -> Loaders:
        length = find_length(one)
        # A process without any batch of a loader that starts over could not continue: it reads all of it.
        is_whole = loader.mode == "max_size_cycle" and length is not None and length < min(longest, shard.size)
        # Without `share`: members start over at other batches on other ranks, which would wait for each other.
        return one if is_whole else shard_eval(one, shard)

    shared = CombinedLoader(map_loaders(share_one, loader.iterables), loader.mode)
    shared.limits = loader.limits
    return shared


def count_eval_rounds(loader: Loaders) -> int | None:
    """Return how many batches the process with the most has, for what `shard_eval` returned: equal on all ranks.

    Limits are to be resolved with it (`resolve_limit`), so that all processes have the same; None if unknown.
    """
    if not isinstance(loader, CombinedLoader):
        return getattr(loader, "num_global_batches", find_length(loader))
    counts = [count_eval_rounds(one) for one in loader.flattened]
    limits = loader.limits if isinstance(loader.limits, list) else [loader.limits] * len(counts)
    if None in counts:
        return None
    capped = [
        min(math.inf if count is None else count, math.inf if limit is None else limit)
        for count, limit in zip(counts, limits, strict=True)
    ]
    return int(combined_length(capped, loader.mode))


def in_loader_order(loader: Loaders, parts: Sequence[Sequence[StepOutput]]) -> list[AnyOutput]:
    """Return predictions of all processes in the order of the user's loader.

    Args:
        loader: A result of `shard_eval`, on any rank.
        parts: For each rank, in order, one item per batch that it read.

    Returns:
        One item per batch. Of a loader that was not distributed, the batches of rank 0 first, then those of rank 1.
    """
    is_sharded = isinstance(loader, (EvalShard, EvalListShard, EvalIterableShard))
    return interleave(parts) if is_sharded else list(chain.from_iterable(parts))


class EvalListShard:
    """The share of a list of batches.

    Attributes:
        loader: The list.
        num_global_batches: Batches of the process that has the most.
    """

    def __init__(self, loader: Sequence[Batch], shard: Shard) -> None:
        self.loader = loader
        self._shard = shard

    @property
    def num_global_batches(self) -> int:
        """Batches of the process that has the most."""
        return -(-len(self.loader) // self._shard.size)

    def global_batch_indices(self, count: int) -> list[int]:
        """Return which batches of the list the first `count` of this process are."""
        return self._shard.numbers(count)

    def __len__(self) -> int:
        return _count_own(len(self.loader), self._shard)

    def __iter__(self) -> Iterator[Batch]:
        return islice(iter(self.loader), self._shard.rank, None, self._shard.size)


class EvalShard:
    """The share of a DataLoader with a map-style data set; may be iterated again and again.

    As in training, all indices are read on all ranks, and only the data of the share is fetched. With persistent
    workers, the random numbers of a batch depend on its number in the user's loader.

    Args:
        loader: The user's loader, which is left alone.
        shard: Part of it that this process reads.
        share: As in `shard_eval`.

    Attributes:
        loader: The same.
    """

    def __init__(self, loader: DataLoader[Batch], shard: Shard, share: Share | None = None) -> None:
        self.loader = loader
        self._shard = shard.with_policy("zero_weight")  # the last global batch may be incomplete
        self._share = share
        self._passes = 0
        name = "sampler" if loader.batch_sampler is None else "batch_sampler"
        sampler = getattr(loader, name)
        self._has_persistent_workers = loader.num_workers > 0 and loader.persistent_workers
        self._draws = self._has_persistent_workers or not _is_sequential(sampler)
        self._index = ShardedIndexStream(sampler, 1, self._shard, first_number=0)
        self._copy = with_indices(loader, self._index, seeds_workers=self._has_persistent_workers)
        change_loader(self._copy, **gathering_parts(loader))

    @property
    def num_global_batches(self) -> int | None:
        """Batches of the process that has the most; None if the loader does not say how many it has."""
        length = find_length(self.loader)
        return None if length is None else -(-length // self._shard.size)

    @property
    def batch_size(self) -> int | None:
        """Samples in a batch, as the user's loader says."""
        return self.loader.batch_size

    @property
    def dataset(self) -> AnyDataset:
        """The user's data set."""
        return self.loader.dataset

    def global_batch_indices(self, count: int) -> list[int]:
        """Return which batches of the user's loader the first `count` of this process are."""
        return self._shard.numbers(count)

    def __len__(self) -> int:
        return _count_own(len(self.loader), self._shard)

    def shut_down(self) -> None:
        """End workers that persist; the next pass starts others."""
        object.__setattr__(self._copy, "_iterator", None)

    def __iter__(self) -> Iterator[Batch]:
        if not self._draws:
            self._index.prepare(0, b"", is_numbered=False)
            return iter(self._copy)
        shared = self._find_rng()
        if self._share is not None and self._shard.rank == 0:
            return self._begin(shared)  # draws as a single process does
        with borrowed_rng(shared):
            return self._begin(shared)

    def _begin(self, rng: StateDict) -> Iterator[Batch]:
        self._index.prepare(0, derive_key(rng, "evaluation"), is_numbered=self._has_persistent_workers)
        if self._has_persistent_workers:  # only some passes start workers, which draws
            copied = cast(SeedingDataset, self._copy.dataset)
            if copied.has_changed():
                self.shut_down()
            self._index.skip(0, {}, lambda: restore_rng({kind: rng[kind] for kind in KINDS if kind in rng}))
        iterator = iter(self._copy)
        self._index.look_ahead(0)  # draws what the sampler draws
        self._index.check()
        return iterator

    def _find_rng(self) -> StateDict:
        """Return the state of the generators with which this pass begins on all ranks."""
        if self._share is not None:
            return self._share(capture_rng())
        self._passes += 1
        with RngStream(f"evaluation {self._passes}".encode()):
            return capture_rng()


def _is_sequential(sampler: AnySampler) -> bool:
    """Return whether the sampler gives the same indices on all ranks without drawing a random number."""
    if type(sampler) is BatchSampler:
        return _is_sequential(sampler.sampler)
    return type(sampler) in (SequentialSampler, list, range, tuple)


def _count_own(length: int, shard: Shard) -> int:
    return max(0, -(-(length - shard.rank) // shard.size))
