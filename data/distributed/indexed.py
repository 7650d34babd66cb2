"""One process's shard of a DataLoader with a map-style data set, or of a list of batches.

Each process reads all indices of the epoch in the same order, and fetches the data of every `size`-th batch.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torch.utils.data import DataLoader
from typing_extensions import override

from ...errors import DataError
from ...protocols import AnySampler, Batch, Indices, StateDict
from ..limit import find_length, resolve_limit
from ..rng import KINDS, RngStream, capture_rng, kinds_that_moved, moved_numpy, restore_kinds, restore_rng
from ..sources.base import Source, position_of
from ..sources.index_stream import _END, _HASH_CHECK, _MOST_BACK, IndexStream, _fold
from ..sources.indexed import IndexedSource
from ..worker import Numbered
from .shard import NO_BATCH, Shard

log = logging.getLogger(__name__)


@contextmanager
def borrowed_rng(state: StateDict) -> Iterator[None]:
    """Return a context in which the global CPU generators are where `capture_rng` saw those of another process.

    At its end, a generator that was at the same place in both processes stays where the block has moved it, as in the
    other process, so that later draws are still equal. One that was elsewhere returns to its place.
    """
    own = capture_rng()
    apart = kinds_that_moved(state, own)
    restore_rng({kind: state[kind] for kind in KINDS if kind in state})
    try:
        yield
    finally:
        restore_kinds({kind: own[kind] for kind in apart})


def shared_rng(rank: int, data_rank: int, rng: StateDict) -> AbstractContextManager[None]:
    """Return a context in which another process that reads rank 0's share draws the same random numbers as rank 0.

    Args:
        rank: Rank of this process.
        data_rank: Which share it reads. For shares other than the first, the context does nothing.
        rng: The state of rank 0's generators.
    """
    return borrowed_rng(rng) if rank and not data_rank else nullcontext()


class ShardedIndexStream(IndexStream):
    """An `IndexStream` that yields every `size`-th batch of indices. Its positions count global batches of this pass.

    Each rank takes a full global batch from its sampler. So the ranks' samplers, and the generators in them, are
    always at the same position, and whether a global batch is complete is known before any of it is used.

    Attributes:
        empty_global_batch: Number of the global batch of this pass that has no batch for this rank; -1 for none.
    """

    def __init__(self, sampler: AnySampler, most_in_flight: int, shard: Shard, *, first_number: int = 1) -> None:
        super().__init__(sampler, most_in_flight)
        self._shard = shard
        self._first_number = first_number
        self._given = 0  # global batches handed to the loader in this pass
        self._skipped = 0  # batches of the epoch before this pass
        self._marks: deque[tuple[int, int]] = deque(maxlen=most_in_flight + _MOST_BACK)
        self._own: deque[Indices] = deque(maxlen=most_in_flight + 1)  # this rank's latest batches of indices
        self._head: list[Indices] = []  # the epoch's first batches of indices, to fill a global batch with
        self._watches_numpy = False
        self.empty_global_batch = -1

    @override
    def __iter__(self) -> Iterator[Indices]:
        hand_out = super().__iter__()
        self._given = self._skipped = 0
        self._watches_numpy = False
        self._head.clear()
        self._marks.clear()
        self._marks.append((0, 0))  # batches of the epoch, and their digest, after each global batch
        self.empty_global_batch = -1
        return hand_out

    @override
    def _hand_out(self) -> Iterator[Indices]:
        if self._to_skip:
            self._skip()
        while True:
            index = self._take_local()
            if index is _END:
                return
            if self._is_numbered:
                # By the batch's number in the epoch: augmentation does not depend on the number of ranks.
                place = self._skipped + (self._given - 1) * self._shard.size + self._shard.rank
                number = self._first_number + place
                yield Numbered(index, self._epoch, self._key + number.to_bytes(8, "little"))
            else:
                yield index

    def _take_local(self) -> Indices:
        """Take the next global batch and return this rank's batch of indices."""
        rank, size, uneven = self._shard.rank, self._shard.size, self._shard.uneven
        ahead = self._ahead
        while len(ahead) < size:
            index = self._pull()
            if index is _END:
                break
            ahead.append(index)
        count = min(len(ahead), size)
        if not count or (count < size and uneven == "stop_all"):
            return _END
        batches = [ahead.popleft() for _ in range(count)]
        place, digest = self._marks[-1]
        for index in batches:
            digest = _fold(digest, index)
        self._marks.append((place + count, digest))
        self._given += 1
        if rank < count or uneven == "cycle":
            own = batches[rank] if rank < count else self._head[(rank - count) % len(self._head)]
            self._own.append(own)
            return own
        self.empty_global_batch = self._given - 1
        return _END

    @override
    def look_ahead(self, position: int, count: int = 1) -> int:
        if self._to_skip:
            self._skip()
        while (known := self._given - position + self._global_batches_ahead()) < count:
            index = self._pull()
            if index is _END:
                return min(count, self._given - position + self._global_batches_ahead())
            self._ahead.append(index)
        return min(count, known)

    def _global_batches_ahead(self) -> int:
        ahead, size = len(self._ahead), self._shard.size
        return self._shard.count_global_batches(ahead) if self._has_ended else ahead // size

    @override
    def fingerprint(self, position: int) -> StateDict:
        mark = self._find_mark(position)
        return {"digest": None if mark is None else mark[1], "hash_check": _HASH_CHECK}

    def count_consumed(self, position: int) -> int:
        """Return how many batches of the epoch all ranks had read after this many global batches of this pass."""
        mark = self._find_mark(position)
        return self._skipped + position * self._shard.size if mark is None else mark[0]

    def _find_mark(self, position: int) -> tuple[int, int] | None:
        place = len(self._marks) - 1 - (self._given - position)
        return self._marks[place] if place >= 0 else None

    @override
    def find(self, position: int) -> Indices:
        back = self._given - position
        return self._own[-1 - back] if 0 <= back < len(self._own) else None

    @override
    def has_ended(self, position: int) -> bool:
        return self._has_ended and not self._ahead and position >= self._given

    def describe_order(self) -> int:
        """Return a number that depends on the indices taken so far: equal on all ranks if their order is."""
        digest = self._marks[-1][1] if self._marks else 0  # not begun: it comes later in a sequence of loaders
        for index in self._ahead:
            digest = _fold(digest, index)
        return digest

    @override
    def _pull(self) -> Indices:
        has_moved = moved_numpy() if self._watches_numpy else None
        index = super()._pull()
        if has_moved is not None and has_moved():
            raise DataError(
                f"The sampler {type(self.sampler).__name__} began to draw from NumPy's global generator in the middle "
                "of an epoch, which is different on each rank.",
                fix="draw from a generator in an attribute, or draw when iteration begins.",
            )
        if self._shard.uneven == "cycle" and index is not _END and len(self._head) < self._shard.size - 1:
            self._head.append(index)
        return index

    @override
    def _first_pull(self) -> Indices:
        # What a sampler draws later must be equal on all ranks, also if it has not drawn yet. NumPy's state takes ten
        # times as long to swap as the others: where it is not used now, it is only watched.
        before = capture_rng()
        index = next(self._inner, _END)
        kinds = {"python", "torch"} | self._moved | kinds_that_moved(before, capture_rng())
        self._stream = RngStream(self._key + b"sampler", kinds)
        self._watches_numpy = "numpy" not in kinds
        return index

    @override
    def _skip(self) -> None:
        super()._skip()
        self._skipped = self._folded
        self._marks[-1] = (self._folded, self._digest)


class ShardedSource(IndexedSource):
    """The share of one process of a DataLoader with a map-style data set.

    Args:
        loader: The same on all ranks, with a sampler that gives the same indices on all ranks.
        shard: Part of it that this process reads.
    """

    def __init__(self, loader: DataLoader[Batch], shard: Shard) -> None:
        self._shard = shard
        self._consumed = 0
        super().__init__(loader)
        self.length = self._find_length()
        self._has_logged = False

    @override
    def _make_index(self, sampler: AnySampler, most_in_flight: int) -> IndexStream:
        self._index_stream = ShardedIndexStream(sampler, most_in_flight, self._shard)
        return self._index_stream

    @override
    def begin_shared(self, epoch: int, shared_rng: StateDict) -> None:
        if self._shard.rank == 0:
            self.begin(epoch)
            return
        with borrowed_rng(shared_rng):
            self.begin(epoch)

    @override
    def begin(self, epoch: int) -> None:
        super().begin(epoch)
        if not self._has_logged and self._shard.rank == 0:
            self._has_logged = True
            self._log_shards()

    def _log_shards(self) -> None:
        """Log once what is distributed, and what is left out of each epoch."""
        loader, shard = self.loader, self._shard
        sampler = self._index.sampler
        log.info(
            "The batches of %s (%s) are distributed over %d processes.",
            type(loader).__name__,
            type(getattr(sampler, "sampler", sampler)).__name__,
            shard.size,
        )
        batches = find_length(loader)
        if batches is None or not self.ends_at_length:
            return
        read = shard.count_global_batches(batches) * shard.size
        if read >= batches or not read:
            return
        samples = self._num_samples()
        if samples is None:
            left_out = f"{batches - read} of {batches} batches are"
        else:
            used = len(self._index) * self._index.sampler.batch_size
            left_out = f"{min(samples, used) - read * self._index.sampler.batch_size} of {samples} samples are"
        log.warning(
            "%s left out of each epoch: %d batches are not divisible by %d processes. To use them, pass "
            "uneven='cycle' to the strategy, or 'zero_weight' where it has that (ddp).",
            left_out,
            batches,
            shard.size,
        )

    @override
    def _go_on_from(self, consumed: int, given: int) -> None:
        self._consumed = consumed
        self.first, self.shift = given, -given

    @override
    def _find_length(self) -> int | None:
        length = find_length(self.loader)
        return None if length is None else self.first + self._shard.count_left(length, self._consumed)

    @override
    def apply_limit(self, limit: int | float | None, name: str) -> int | float:
        limited = self._shard.resolve_limit(limit, find_length(self.loader), name)
        if self._is_at_end or limited is None:
            return resolve_limit(None, self.length, name)
        return self.first + self._shard.count_left(limited, self._consumed)

    @override
    def take(self) -> Batch:
        try:
            batch = self._fetch()
        except StopIteration:
            if self._index_stream.empty_global_batch != self.position + self.shift:
                raise
            batch = NO_BATCH
        self.position += 1
        return batch

    @override
    def _count_consumed(self, place: int) -> int:
        return self._index_stream.count_consumed(place)

    @override
    def state_dict(self, back: int = 0) -> StateDict:
        state = super().state_dict(back)
        if self._loaded is not None:
            return state
        # Generators of the data set have moved by what this rank has read.
        is_per_rank = not self._has_workers and bool(self._find_data_generators())
        is_per_rank = is_per_rank or "dataset" in self._stateful()
        return {**state, "is_dealt": True, "is_per_rank": is_per_rank, "data_size": self._shard.size}

    def _load(self, state: StateDict) -> None:
        if state.get("is_dealt") is False and state["is_open"] and not state["is_at_end"]:
            raise DataError(
                f"The checkpoint was made in the middle of an epoch in which each process read its own "
                f"{type(self.loader).__name__}; now its batches are distributed over the processes.",
                fix="resume with the sampler and the use_distributed_sampler=... of that run, or from a checkpoint "
                "made at the end of an epoch.",
            )
        super()._load(state)

    @override
    def describe_order(self) -> int | None:
        return self._index_stream.describe_order()


class ShardedListSource(Source):
    """The share of one process of a list or tuple of batches.

    Args:
        loader: The same on all ranks.
        shard: Part of it that this process reads.
    """

    kind = "replay"  # its states fit those of one process
    loader: list[Batch] | tuple[Batch, ...]

    def __init__(self, loader: list[Batch] | tuple[Batch, ...], shard: Shard) -> None:
        super().__init__(loader)
        self._shard = shard
        self._consumed = 0
        self.length = shard.count_global_batches(len(loader))

    @override
    def begin(self, epoch: int) -> None:
        self._loaded = None
        self._start(epoch, consumed=0, given=0)

    @override
    def resume(self, epoch: int) -> None:
        state, self._loaded = self._loaded, None
        assert state is not None
        self._start(epoch, consumed=state["position"], given=position_of(state))

    def _start(self, epoch: int, *, consumed: int, given: int) -> None:
        self._epoch, self._is_open, self.ends_at_length = epoch, True, True
        self._consumed, self.first, self.position = consumed, given, given
        self.length = given + self._shard.count_left(len(self.loader), consumed)

    @override
    def apply_limit(self, limit: int | float | None, name: str) -> int | float:
        assert self.length is not None
        limited = self._shard.resolve_limit(limit, len(self.loader), name)
        return self.length if limited is None else self.first + self._shard.count_left(limited, self._consumed)

    @override
    def has_next(self) -> bool:
        return self._is_open and self.length is not None and self.position < self.length

    @override
    def take(self) -> Batch:
        if not self.has_next():
            raise StopIteration
        number = self._place(self.position) + self._shard.rank
        self.position += 1
        count = len(self.loader)
        if number < count:
            return self.loader[number]
        return self.loader[(number - count) % count] if self._shard.uneven == "cycle" else NO_BATCH

    def _place(self, position: int) -> int:
        return self._consumed + (position - self.first) * self._shard.size

    @override
    def close(self) -> None:
        self._is_open = self.ends_at_length = False

    @override
    def state_dict(self, back: int = 0) -> StateDict:
        if self._loaded is not None:
            return self._loaded
        position = self.position - back
        consumed = min(self._place(position), len(self.loader))
        return {
            "kind": self.kind,
            "is_open": self._is_open,
            "is_at_end": consumed >= len(self.loader),
            "is_dealt": True,
            "is_per_rank": False,
            "data_size": self._shard.size,
            "epoch": self._epoch,
            "position": consumed,
            "rounds": position,
            "num_workers": 0,
            "opening": {},
            "current": {},
        }
