"""One process's shard of a DataLoader with a `ShardedIterable`."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Iterator
from typing import TypeGuard

from torch.utils.data import DataLoader
from typing_extensions import override

from ...messages import counted
from ...protocols import Batch, Loaders, StateDict
from ..limit import find_length
from ..rng import RngStream, capture_generators, capture_rng, derive_key, find_generators, restore_generators
from ..sharded_iterable import CollateShare, IterableShare, ShardedIterable
from ..sources.base import Source
from ..tree import changed_loader
from ..worker import WorkerInit
from .shard import NO_BATCH, Shard

log = logging.getLogger(__name__)
_END = (None, None)  # no batch


def is_sharded_iterable(loader: Loaders) -> TypeGuard[DataLoader[Batch]]:
    """Return whether this is a DataLoader with a `ShardedIterable` whose batches can be distributed."""
    return (
        isinstance(loader, DataLoader)
        and isinstance(loader.dataset, ShardedIterable)
        and loader.dataset.split is None
        and type(loader).__iter__ is DataLoader.__iter__
    )


def of_rank(loader: Loaders, shard: Shard) -> Loaders:
    """Return a loader that reads this process's share by itself.

    Args:
        loader: Of a `ShardedIterable` with `split`, a copy with the data set of this rank is returned; where it has
            none and cannot be distributed, the rank is set on its data set; any other loader stays as it is.
        shard: Part of the data that this process reads.
    """
    data = getattr(loader, "dataset", None)
    if not isinstance(data, ShardedIterable):
        return loader
    rank, size = (shard.rank, shard.size) if shard.splits else (0, 1)
    if data.split is None or not isinstance(loader, DataLoader) or type(loader).__iter__ is not DataLoader.__iter__:
        data.set_shard(rank, size)
        return loader
    return changed_loader(loader, dataset=data.of_rank(rank, size))


def _data_of(loader: DataLoader[Batch]) -> ShardedIterable:
    assert isinstance(loader.dataset, ShardedIterable)  # see `is_sharded_iterable`
    return loader.dataset


def _find_length(loader: DataLoader[Batch]) -> int | None:
    """Return how many batches one process would read; None where the user's data set does not say."""
    return find_length(changed_loader(loader, dataset=_data_of(loader).dataset))


def _open_share(
    loader: DataLoader[Batch], shard: Shard, key: bytes, *, start: int = 0, first: int = 0
) -> Iterator[tuple[Batch, int | None]]:
    """Begin a pass over the shard; yields batches, each with a digest of the order.

    Args:
        loader: The user's loader.
        shard: The share.
        key: Key of the random numbers, equal on all ranks; the global generators are left alone.
        start: Samples to leave out.
        first: Number of the first global batch.
    """
    share = IterableShare(
        _data_of(loader).dataset, shard.rank, shard.size, shard.uneven, loader.batch_size, loader.drop_last, start, key
    )  # fmt: skip
    collate = CollateShare(
        loader.collate_fn, key + shard.rank.to_bytes(4, "little"), first, is_batched=loader.batch_size is not None
    )  # fmt: skip
    changes = {
        "dataset": share, "batch_sampler": None, "batch_size": None, "drop_last": False, "collate_fn": collate,
        "worker_init_fn": WorkerInit(loader.worker_init_fn), "persistent_workers": False, "generator": None,
        "in_order": True,
    }  # fmt: skip
    with RngStream(key + b"workers"):
        return iter(changed_loader(loader, **changes))


class ShardedIterableSource(Source):
    """The share of one process of a DataLoader with a `ShardedIterable`.

    Every process reads the full stream, so each knows the end of the epoch without communication.
    A position is a number of samples; returning to it reads the samples before it again.

    Args:
        loader: The same on all ranks.
        shard: Part of it that this process reads.
    """

    kind = "iterable"
    loader: DataLoader[Batch]

    def __init__(self, loader: DataLoader[Batch], shard: Shard) -> None:
        super().__init__(loader)
        self._shard = shard
        self._iterator: Iterator[tuple[Batch, int | None]] = iter(())
        self._ahead: deque[Batch] = deque()
        self._order: int | None = None
        self._has_ended = False
        self._samples = 0  # of all processes, before the first batch of this pass
        self._key = b""
        self._opening: StateDict = {}
        self._data = _data_of(loader)
        self._find_lengths()

    @property
    def _global_batch_size(self) -> int:
        return self._shard.size * (self.loader.batch_size or 1)

    @property
    def _consumed(self) -> int:
        """Batches of all processes before this pass."""
        return -(-self._samples // (self.loader.batch_size or 1))

    def _find_lengths(self) -> None:
        length = _find_length(self.loader)
        self.length = None if length is None else self.first + self._shard.count_left(length, self._consumed)

    @override
    def begin(self, epoch: int) -> None:
        self.begin_shared(epoch, capture_rng())

    @override
    def begin_shared(self, epoch: int, shared_rng: StateDict) -> None:
        state, self._loaded = self._loaded, None
        if state is not None:
            restore_generators(self._find_generators(), state["current"])
        self._opening = capture_generators(self._find_generators())
        self._start(epoch, derive_key(shared_rng, epoch, "iterable"), samples=0, global_batches=0)

    @override
    def resume(self, epoch: int) -> None:
        state = self._loaded
        assert state is not None
        if state["is_at_end"]:  # nothing to give; `begin` of the next epoch needs the state
            self.position, self._is_open, self._has_ended = state["rounds"], True, True
            self._ahead.clear()
            self._stay_at_end()
            return
        self._loaded = None
        self._opening = state["opening"]
        restore_generators(self._find_generators(), self._opening)
        if state["samples"] and self._shard.rank == 0:
            log.warning(
                "%s cannot begin in the middle of an epoch: reading %s again.",
                type(self._data.dataset).__name__,
                counted(state["samples"], "sample"),
            )
        self._start(epoch, bytes.fromhex(state["key"]), samples=state["samples"], global_batches=state["rounds"])

    def _start(self, epoch: int, key: bytes, *, samples: int, global_batches: int) -> None:
        self._epoch, self._key, self._samples = epoch, key, samples
        self.first = self.position = global_batches
        self.shift = self._consumed // self._shard.size - global_batches
        self._is_open, self._has_ended, self._order = True, False, None
        self._ahead.clear()
        self._iterator = iter(())  # ends the workers of an epoch that was cut short
        self._iterator = _open_share(self.loader, self._shard, key, start=samples, first=global_batches)
        self._find_lengths()

    @override
    def apply_limit(self, limit: int | float | None, name: str) -> int | float:
        limited = self._shard.resolve_limit(limit, _find_length(self.loader), name)
        if limited is None:
            self.most = math.inf if self.length is None else self.length
        else:
            self.most = self.first + self._shard.count_left(limited, self._consumed)
        return self.most

    @override
    def at_most(self, upto: int) -> int:
        """Return how many batches are left, at most `upto`: exact, and equal on all ranks."""
        if self.length is not None:
            upto = min(upto, self.length - self.position)
        while len(self._ahead) < upto and not self._has_ended and self._is_open:
            read = next(self._iterator, _END)
            if read is _END:
                self._has_ended = True
                break
            batch, self._order = read
            self._ahead.append(batch)
        return max(0, min(upto, len(self._ahead)))

    @override
    def has_next(self) -> bool:
        return self.at_most(1) > 0

    @override
    def take(self) -> Batch:
        if not self.has_next():
            raise StopIteration
        self.position += 1
        return self._ahead.popleft()

    @override
    def can_go_back(self, back: int) -> bool:
        return back <= self.position - self.first

    @override
    def state_dict(self, back: int = 0) -> StateDict:
        if self._loaded is not None:  # not yet entered, or entered at its end
            return self._loaded
        position = self.position - back
        is_at_end = not back and self._has_ended and not self._ahead
        samples = self._samples + (position - self.first) * self._global_batch_size
        return {
            "kind": self.kind,
            "is_open": self._is_open,
            "is_at_end": is_at_end or (self.length is not None and position >= self.length),
            "is_dealt": True,
            "is_per_rank": False,
            "data_size": self._shard.size,
            "epoch": self._epoch,
            "position": -(-samples // (self.loader.batch_size or 1)),
            "samples": samples,
            "rounds": position,
            "key": self._key.hex(),
            "opening": self._opening,
            "current": capture_generators(self._find_generators()),
        }

    def _find_generators(self) -> StateDict:
        # Workers have copies of their own, which start again in each pass.
        return {} if self.loader.num_workers else find_generators(dataset=self._data.dataset)

    @override
    def describe_order(self) -> int | None:
        self.has_next()
        return self._order

    @override
    def close(self) -> None:
        self._iterator = iter(())
        self._ahead.clear()
        self._is_open = False


class EvalIterableShard:
    """One process's share of an evaluation loader with a `ShardedIterable`; may be iterated again and again.

    Args:
        loader: The user's loader.
        shard: Part of it that this process reads.

    Attributes:
        loader: The same.
    """

    def __init__(self, loader: DataLoader[Batch], shard: Shard) -> None:
        self.loader = loader
        self._shard = shard.with_policy("zero_weight")  # the last global batch may be incomplete

    @property
    def num_global_batches(self) -> int | None:
        """Batches of the process that has the most; None if the loader does not say how many it has."""
        length = _find_length(self.loader)
        return None if length is None else self._shard.count_global_batches(length)

    def global_batch_indices(self, count: int) -> list[int]:
        """Return which batches of the user's loader the first `count` of this process are."""
        return self._shard.numbers(count)

    def __iter__(self) -> Iterator[Batch]:
        # The same in each pass, and on all ranks.
        for batch, _ in _open_share(self.loader, self._shard, b"evaluation"):
            if batch is not NO_BATCH:
                yield batch
