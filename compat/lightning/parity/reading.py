"""Training data as Lightning reads them: one iteration per epoch, from the generators of training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from torch.utils.data import DataLoader
from typing_extensions import override

from ....data.combined import CombinedLoader
from ....data.distributed.shard import Shard, is_rank_aware
from ....data.distributed.synchronized import SynchronizedSource
from ....data.limit import find_length, resolve_limit
from ....data.sources.base import Source, announce_epoch, position_of
from ....data.sources.combined import combined_length
from ....data.stream import BatchStream
from ....data.tree import is_collection
from ....errors import DataError
from ....protocols import Batch, Loaders, StateDict
from ....trainer.trainer import Trainer
from .switches import active
from .within_windows import WindowEnded
from .workers import seeded

__all__ = ["FetchedSource", "FetchedStream", "fetch_batches", "try_to_iterate"]

_NOTHING: Any = object()


class FetchedSource(Source):
    """Any loader. Its first iteration begins when the source is made, as Lightning's does before training starts.

    For a loader without a length and a limit, one batch is fetched ahead to know when it ends. A limit counts as the
    length; if the data end earlier, so does the epoch, without a step for the open window.

    Args:
        loader: A loader, or a collection of loaders.
        limit: Maximum number of batches; None for all.
        name: Name of that argument, for errors.
    """

    kind = "fetched"

    def __init__(self, loader: Loaders, limit: int | float | None, name: str) -> None:
        super().__init__(loader)
        self._combined_length: int | float | None = None
        if is_collection(loader):
            loader = CombinedLoader(loader, mode="max_size_cycle")
        if isinstance(loader, CombinedLoader):
            combined = CombinedLoader(loader.iterables, mode=loader.mode)
            combined.flattened = [seeded(member) for member in loader.flattened]
            lengths = [find_length(member) for member in combined.flattened]
            if None not in lengths:
                self._combined_length = combined_length([resolve_limit(limit, n, name) for n in lengths], loader.mode)
            loader = combined
        self._iterable: Any = seeded(loader)  # Any: anything that can be iterated
        self._ahead: Any = _NOTHING
        self._fetched: Iterator[Batch] = iter(())
        self._promised = limit if isinstance(limit, int) else None  # batches, where the loader does not know
        self._is_exhausted = False
        self._is_fresh = True  # the iteration that began with the source is not used yet
        self._is_open = False
        self._epoch = 0
        self._loaded: StateDict | None = None
        try_to_iterate(self._iterable)
        self._iterate()

    def _iterate(self) -> None:
        """Begin to iterate; draws what the loader itself draws then."""
        if isinstance(self._iterable, CombinedLoader):
            self._fetched = (batch for batch, _, _ in self._iterable)
            self.length = None if self._combined_length is None else int(self._combined_length)
        else:
            self._fetched = iter(self._iterable)
            self.length = find_length(self._iterable)
        self._is_exhausted = False
        reads_ahead = self.length is None and self._promised is None
        self._ahead = next(self._fetched, _NOTHING) if reads_ahead else _NOTHING

    @override
    def begin(self, epoch: int) -> None:
        self._open(epoch)
        self._loaded = None

    def _open(self, epoch: int) -> None:
        # The first epoch of a process uses the first iteration; each later one begins its own.
        if not (self._is_fresh and (epoch == 0 or self._loaded is not None)):
            self._iterate()
        self._is_fresh = False
        self._epoch, self.position, self._is_open = epoch, 0, True
        self.ends_at_length = self.length is not None

    @override
    def resume(self, epoch: int) -> None:
        state = self._loaded
        assert state is not None
        self._open(epoch)
        self._loaded = None
        self.position = position_of(state)

    @override
    def has_next(self) -> bool:
        if not self._is_open:
            return False
        if self.length is not None:
            return self.position < self.length
        if self._promised is not None:
            return not self._is_exhausted and self.position < self._promised
        return self._ahead is not _NOTHING

    @override
    def take(self) -> Batch:
        if self.length is None and self._promised is not None:
            batch = next(self._fetched, _NOTHING)
            if batch is _NOTHING:
                self._is_exhausted = True
                self._end_window()
        elif self.length is None:
            batch, self._ahead = self._ahead, _NOTHING
            if self.position + 1 < self.most:
                self._ahead = next(self._fetched, _NOTHING)
        else:
            batch = next(self._fetched, _NOTHING)
        if batch is _NOTHING:
            raise DataError(
                f"Expected {self.length} batches from {type(self.loader).__name__}, as its length says, got "
                f"{self.position}.",
                fix="correct the loader's length, or run the program without the parity switch 'reading'.",
            )
        self.position += 1
        return batch

    def _end_window(self) -> NoReturn:
        if "within_windows" in active():
            raise WindowEnded(self.position)
        raise DataError(
            f"Expected limit_train_batches={self._promised} batches from {type(self.loader).__name__}, got "
            f"{self.position}.",
            fix="lower limit_train_batches, or switch on 'within_windows' beside the parity switch 'reading'.",
        )

    @override
    def count_ahead(self, upto: int) -> int | None:
        if self.length is None and self._promised is not None:
            return max(0, min(upto, self._promised - self.position)) if self.has_next() else 0
        return None if self.length is None else max(0, min(upto, self.length - self.position))

    @override
    def announce_epoch(self, epoch: int) -> None:
        members = self._iterable.flattened if isinstance(self._iterable, CombinedLoader) else [self._iterable]
        for member in members:
            announce_epoch(member, epoch)

    @override
    def state_dict(self, back: int = 0) -> StateDict:
        if self._loaded is not None:
            return self._loaded
        position = self.position - back
        return {
            "kind": self.kind,
            "is_open": self._is_open,
            "is_at_end": not back and not self.has_next(),
            "epoch": self._epoch,
            "position": position,
            "rounds": position,
            "is_dealt": True,
        }

    @override
    def load_state_dict(self, state: StateDict) -> None:
        self._loaded = state  # of any kind of loader: only the position counts

    def _load(self, state: StateDict) -> None:
        self._loaded = state

    @override
    def close(self) -> None:
        self._fetched = iter(())
        self._ahead = _NOTHING
        self._is_open = self.ends_at_length = False


class FetchedStream(BatchStream):
    """A `BatchStream` that reads as Lightning does. Without `samplers`, data are distributed over ranks as here.

    Args:
        loader, limit, name, shard, agree: See `BatchStream`.
    """

    def __init__(
        self,
        loader: Loaders,
        limit: int | float | None = None,
        *,
        name: str = "limit_train_batches",
        shard: Shard | None = None,
        agree: Callable[[int], int] | None = None,
    ) -> None:
        is_split = shard is not None and shard.size > 1 and shard.splits and "samplers" not in active()
        if is_split and not _is_placed(loader):
            super().__init__(loader, limit, name=name, shard=shard, agree=agree)
            return
        super().__init__([], None, name=name)
        self.loader, self._shard, self._limit = loader, shard, limit
        source: Source = FetchedSource(loader, limit, name)
        if shard is not None and shard.size > 1:
            source = SynchronizedSource(source, shard, agree)
        self._source = source
        self.num_batches = source.apply_limit(limit, name)
        self.is_sized_exactly = source.length is not None
        self.next_batch = source.take


def try_to_iterate(loader: Any) -> None:  # Any: anything that can be iterated
    """Begin one iteration more of each loader that is not a DataLoader, as Lightning does to see that it can be."""
    for member in loader.flattened if isinstance(loader, CombinedLoader) else [loader]:
        if not isinstance(member, DataLoader):
            iter(member)


def fetch_batches(trainer: Trainer) -> None:
    """Let training read its loaders as Lightning does."""
    trainer.parts.loaders.make_stream = FetchedStream


def _is_placed(loader: Loaders) -> bool:
    """Return whether each process already has its own part of the data."""
    if is_collection(loader):
        loader = CombinedLoader(loader)
    members = loader.flattened if isinstance(loader, CombinedLoader) else [loader]
    return all(is_rank_aware(member) for member in members)
