"""Choice of the source that a `BatchStream` reads on one of several processes: sharded, or synchronized."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence

from typing_extensions import override

from ...protocols import Batch, Loaders, StateDict
from ..combined import CombinedLoader
from ..limit import find_length
from ..rng import RngStream, capture_rng, derive_key
from ..sources.base import Source
from ..sources.choose import make_source
from ..sources.combined import CombinedSource
from ..sources.indexed import is_indexed
from ..sources.stateful import is_stateful
from ..tree import is_collection, unflatten
from .indexed import ShardedListSource, ShardedSource, borrowed_rng
from .iterable import ShardedIterableSource, is_sharded_iterable, of_rank
from .shard import NO_BATCH, Shard, find_samplers, is_rank_aware
from .synchronized import SynchronizedSource

log = logging.getLogger(__name__)


def make_shared_source(loader: Loaders, shard: Shard, agree: Callable[[int], int] | None) -> tuple[Source, bool]:
    """Return the source that reads this process's share of a loader, and whether all of the data is distributed.

    Args:
        loader: The user's training data.
        shard: Part of the data that this process reads.
        agree: See `BatchStream`.
    """
    source, is_sharded = _make(loader, shard)
    return (source if is_sharded else SynchronizedSource(source, shard, agree)), is_sharded


def _make(loader: Loaders, shard: Shard) -> tuple[Source, bool]:
    if is_collection(loader):
        loader = CombinedLoader(loader, mode="max_size_cycle")
    if isinstance(loader, CombinedLoader):
        return _make_combined(loader, shard)
    if is_sharded_iterable(loader):
        return (ShardedIterableSource(loader, shard), True) if shard.splits else (make_source(loader), False)
    if hasattr(loader, "dataset"):
        loader = of_rank(loader, shard)
    if not shard.splits or is_stateful(loader):
        return make_source(loader, is_placed=True), False
    if is_rank_aware(loader):
        _check_replicas(loader, shard)
        return make_source(loader), False
    if is_indexed(loader):
        return ShardedSource(loader, shard), True
    if isinstance(loader, (list, tuple)):
        return ShardedListSource(loader, shard), True
    return make_source(loader, is_placed=True), False


def _make_combined(loader: CombinedLoader, shard: Shard) -> tuple[Source, bool]:
    limits = loader.limits
    all_limits = limits if isinstance(limits, list) else [limits] * len(loader.flattened)
    shards = [shard] * len(loader.flattened)
    if loader.mode == "max_size_cycle":
        # Those that begin again anyway are filled up from their beginning: only the longest ends the epoch.
        lengths = [find_length(one) for one in loader.flattened]
        longest = max((math.inf if length is None else length for length in lengths), default=0)
        repeats = shard.with_policy("cycle")
        shards = [shard if length in (None, longest) else repeats for length in lengths]
    pairs = [_make(one, own) for one, own in zip(loader.flattened, shards, strict=True)]
    source = SharedCombinedSource(
        loader.iterables,
        [source for source, _ in pairs],
        mode=loader.mode,
        limits=all_limits,
        shard=shard,
        are_sharded=[is_sharded for _, is_sharded in pairs],
    )
    return source, all(is_sharded for _, is_sharded in pairs)


class SharedCombinedSource(CombinedSource):
    """A collection of loaders; each is distributed by itself, or read by each process as it is.

    Positions and lengths are this process's, for the collection and its members; so modes mean what they mean with one
    process. A loader that starts in the middle of an epoch draws random numbers that are equal on all ranks.

    Args:
        loaders, sources, mode, limits: As in `CombinedSource`.
        shard: Part of the data that this process reads.
        are_sharded: For each source, whether it is distributed.
    """

    def __init__(
        self,
        loaders: Loaders,
        sources: Sequence[Source],
        *,
        mode: str,
        limits: Sequence[int | float | None],
        shard: Shard,
        are_sharded: Sequence[bool],
    ) -> None:
        super().__init__(loaders, sources, mode=mode, limits=limits)
        self._shard = shard
        self._are_sharded = are_sharded
        self._passes = [0] * len(sources)
        self._key = b""

    @override
    def begin(self, epoch: int) -> None:
        self.begin_shared(epoch, capture_rng())

    @override
    def begin_shared(self, epoch: int, shared_rng: StateDict) -> None:
        self._loaded = None
        self._open(epoch)
        self._passes = [0] * len(self._sources)
        self._key = derive_key(shared_rng, epoch, "collection")
        numbers = range(min(1, len(self._sources)) if self._mode == "sequential" else len(self._sources))
        # Those that draw on one rank only come last, so that the others draw the same one after the other.
        for number in sorted(numbers, key=lambda number: not self._are_sharded[number]):
            source = self._sources[number]
            if not self._are_sharded[number]:
                source.begin_shared(epoch, shared_rng)
            elif self._shard.rank == 0:
                source.begin(epoch)
            else:
                with borrowed_rng(shared_rng):
                    source.begin(epoch)
                    shared_rng = capture_rng()
        self.length = self._find_length()

    @override
    def _begin(self, number: int) -> None:
        self._passes[number] += 1
        rank = 0 if self._are_sharded[number] else self._shard.rank
        with RngStream(self._key + repr((number, self._passes[number], rank)).encode()):
            self._sources[number].begin(self._epoch)

    @override
    def take(self) -> Batch:
        if self._mode == "sequential":
            return super().take()
        parts = [self._take_from(number) for number in range(len(self._sources))]
        self.position += 1
        if self._mode == "max_size":
            parts = [None if part is NO_BATCH else part for part in parts]
            return unflatten(self.loader, parts) if any(part is not None for part in parts) else NO_BATCH
        return NO_BATCH if any(part is NO_BATCH for part in parts) else unflatten(self.loader, parts)

    @override
    def describe_order(self) -> int | None:
        orders = [source.describe_order() for source in self._sources]
        return hash(tuple(-1 if order is None else order for order in orders)) if any(self._are_sharded) else None

    @override
    def resume(self, epoch: int) -> None:
        assert self._loaded is not None
        self._passes = list(self._loaded.get("passes", [0] * len(self._sources)))
        self._key = bytes.fromhex(self._loaded.get("key", ""))
        super().resume(epoch)

    @override
    def state_dict(self, back: int = 0) -> StateDict:
        state = super().state_dict(back)
        if self._loaded is not None:
            return state
        return {
            **state,
            "is_dealt": all(self._are_sharded),
            "is_per_rank": any(source.get("is_per_rank", True) for source in state["sources"]),
            "data_size": self._shard.size,
            "rounds": state["position"],
            "passes": list(self._passes),
            "key": self._key.hex(),
        }


def _check_replicas(loader: Loaders, shard: Shard) -> None:
    for sampler in find_samplers(loader):
        replicas = getattr(sampler, "num_replicas", None)
        if replicas is not None and (replicas, getattr(sampler, "rank", None)) != (shard.size, shard.rank):
            log.warning(
                "%s has num_replicas=%s and rank=%s on rank %d of %d processes: it is used unchanged, so samples may "
                "be read twice or not at all. Without it, batches are distributed over all processes.",
                type(sampler).__name__,
                replicas,
                getattr(sampler, "rank", None),
                shard.rank,
                shard.size,
            )


def advise_smaller_batches(loader: Loaders, shard: Shard) -> str | None:
    """Return the remedy if there are fewer batches than processes; otherwise None."""
    length = find_length(loader) if isinstance(loader, (list, tuple)) or is_indexed(loader) else None
    if not length or length >= shard.size or not shard.splits:
        return None
    return (
        f"the loader has {length} batches for {shard.size} processes: pass a smaller batch_size, fewer processes, or "
        "uneven='cycle' to the strategy, or 'zero_weight' where it has that (ddp)."
    )
