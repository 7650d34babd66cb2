"""`ShardedIterable`: an iterable data set whose samples are split over ranks and workers.

The Trainer and Fabric distribute full batches of it (data/distributed/iterable.py), so the samples of a step do not
depend on the number of ranks or workers.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeAlias, TypeVar

import torch
from torch.utils.data import IterableDataset, default_collate, get_worker_info
from torch.utils.data._utils import worker as torch_worker
from torch.utils.data._utils.collate import default_convert

from ..errors import ConfigError, DataError
from ..protocols import AnyBatch, AnyDataset, Batch, Tree
from .distributed.fingerprint import fingerprint_batch
from .distributed.shard import NO_BATCH, NoBatch
from .rng import RngStream, find_generators, moved_numpy, seed_generators
from .sources.reread import is_one_shot

T = TypeVar("T")
Samples: TypeAlias = list[AnyBatch] | NoBatch
_Place: TypeAlias = tuple[Samples, int, int]  # samples of a batch, its number, and a digest of the order


class ShardedIterable(IterableDataset[AnyBatch]):
    """Splits an iterable data set over ranks and DataLoader workers; each sample is read by one of them.

    Pass it to a DataLoader: `DataLoader(ShardedIterable(dataset), batch_size=32, num_workers=2)`. The Trainer and
    Fabric then distribute the batches: with 4 ranks, rank 1 gets the batches 1, 5, 9, ... of those that one process
    would read. A checkpoint counts samples, so a run resumes after those it has read, also on another number of ranks.

    Every rank and worker iterates over the full data set and keeps its samples. So the order must be the same
    everywhere: a random order may depend on `set_epoch`, the global generators, or generators in attributes. The data
    set must not split itself by rank, and `get_worker_info` returns None in it.

    It has no length, because a shard's length depends on its reader; the Trainer uses the length of the data set.

    Elsewhere (a handwritten loop, torchdata's StatefulDataLoader, `torchdata.nodes`) iteration yields every n-th sample
    for n readers, by the rank in torch.distributed and by worker.

    Args:
        dataset: Object that can be iterated repeatedly: an IterableDataset, a Hugging Face streaming data set, or any
            other with `__iter__`.
        split: Function `split(dataset, rank, size)` that returns the data set of one rank, as `split_dataset_by_node`
            of Hugging Face's `datasets` does; cheaper where reading is slow. The data set then handles workers itself,
            each rank has its own position, and a run resumes within an epoch only on the same number of ranks.

    Attributes:
        dataset: The user's data set.

    Raises:
        ConfigError: The data set cannot be iterated, or only once.
    """

    def __init__(self, dataset: AnyDataset, split: Callable[[AnyDataset, int, int], AnyDataset] | None = None) -> None:
        if not hasattr(dataset, "__iter__") or is_one_shot(dataset):
            raise ConfigError(
                f"Expected ShardedIterable(dataset) with a data set that can be iterated again and again, got "
                f"{type(dataset).__name__}.",
                fix="pass an object of a class with __iter__; a map-style data set goes to the DataLoader as it is.",
            )
        self.dataset = dataset
        self.split = split
        self._place: tuple[int, int] | None = None

    def set_shard(self, rank: int, size: int) -> None:
        """Set the shard that `__iter__` yields; the default is that of torch.distributed.

        Args:
            rank: Rank of this process among the ranks that read different data.
            size: Number of these ranks.
        """
        self._place = (rank, size)

    def of_rank(self, rank: int, size: int) -> AnyDataset:
        """Return the data set of one rank, as `split` makes it; with one rank, the data set."""
        return self.dataset if self.split is None or size == 1 else self.split(self.dataset, rank, size)

    def __iter__(self) -> Iterator[Batch]:
        rank, size = self._place or _own_place()
        if self.split is not None:
            return iter(self.of_rank(rank, size))
        info = get_worker_info()
        number, workers = (0, 1) if info is None else (info.id, info.num_workers)
        return _every_nth(self.dataset, rank + number * size, size * workers)

    def __getattr__(self, name: str) -> Any:
        if name == "set_epoch":
            return self.dataset.set_epoch
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


def _own_place() -> tuple[int, int]:
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return 0, 1


def _every_nth(dataset: Iterable[T], first: int, step: int) -> Iterator[T]:
    with _without_worker():
        samples = iter(dataset)
    for number in range(sys.maxsize):
        with _without_worker():
            sample = next(samples, _END)
        if sample is _END:
            return
        if number % step == first:
            yield sample


_END: Any = object()


@contextmanager
def _without_worker() -> Iterator[None]:
    """Let a data set that splits itself by `get_worker_info()` give everything: the split is made here."""
    info, torch_worker._worker_info = torch_worker._worker_info, None
    try:
        yield
    finally:
        torch_worker._worker_info = info


@dataclass
class IterableShare(IterableDataset["_Place"]):
    """Batches of samples, before collation, of one rank, or of one worker of it.

    Attributes:
        dataset: Read to its end by every rank and worker.
        rank: Which batch of a global batch is yielded.
        size: Batches in a global batch.
        uneven: What happens to an incomplete last global batch: see `Shard`.
        batch_size: Samples of a batch; None: a sample is a batch.
        drop_last: Whether a short last batch is left out.
        start: Samples before the first global batch.
        key: Key of the random numbers with which the data set is read: equal on all ranks.
    """

    dataset: AnyDataset
    rank: int
    size: int
    uneven: str
    batch_size: int | None
    drop_last: bool
    start: int
    key: bytes

    def __iter__(self) -> Iterator[_Place]:
        """Yield samples (a list; `NO_BATCH` where only other ranks have some), number, and a digest of the order."""
        info = get_worker_info()
        number, workers = (0, 1) if info is None else (info.id, info.num_workers)
        if info is not None:
            # A copy that starts from the same place in each epoch and worker.
            seed_generators(find_generators(dataset=self.dataset), self.key)
        for place, samples in enumerate(self._rounds(is_in_worker=info is not None)):
            if place % workers == number:
                yield samples, place, self._order

    def _rounds(self, *, is_in_worker: bool) -> Iterator[Samples]:
        course = _Course(self.key, keeps_numpy=is_in_worker)
        per_batch = self.batch_size or 1
        head: list[list[AnyBatch]] = []  # the epoch's first batches, to fill a global batch with
        with course:
            stream = iter(self.dataset)
            first = list(islice(stream, per_batch))
        self._order = digest(first)
        to_skip = self.start
        pending = first  # read, and not yet part of a batch

        def take(count: int) -> list[AnyBatch]:
            taken = pending[:count]
            del pending[:count]
            return taken + list(islice(stream, count - len(taken)))

        with course:
            while self.uneven == "cycle" and to_skip and len(head) < self.size - 1:
                batch = take(min(per_batch, to_skip))
                to_skip -= len(batch)
                if len(batch) < per_batch:
                    to_skip = 0
                    break
                head.append(batch)
            while to_skip > 0 and (skipped := len(take(min(to_skip, 1024)))):
                to_skip -= skipped
        while True:
            own: Samples | None = None
            count = 0
            with course:
                while count < self.size:
                    samples = take(per_batch)
                    if not samples or (self.drop_last and len(samples) < per_batch):
                        break
                    if count == self.rank:
                        own = samples
                    if self.uneven == "cycle" and len(head) < self.size - 1:
                        head.append(samples)
                    count += 1
            if not count or (count < self.size and self.uneven == "stop_all"):
                return
            if own is None:
                own = head[(self.rank - count) % len(head)] if self.uneven == "cycle" else NO_BATCH
            yield own
            if count < self.size:
                return


class _Course:
    """The random numbers with which a data set is read: equal for all readers, whatever training draws."""

    def __init__(self, key: bytes, *, keeps_numpy: bool) -> None:
        self._streams = [RngStream(key, ("python", "torch")), RngStream(key, ("numpy",))]
        self._keeps_numpy = keeps_numpy
        self._has_begun = False
        self._has_moved: Callable[[], bool] = lambda: False
        self._stack = ExitStack()

    def __enter__(self) -> None:
        self._stack.enter_context(_without_worker())
        for stream in self._streams:
            self._stack.enter_context(stream)
        self._has_moved = (lambda: False) if self._keeps_numpy else moved_numpy()

    def __exit__(self, *error: object) -> None:
        has_moved = self._has_moved()
        self._stack.close()
        if self._keeps_numpy:
            return
        # NumPy's state takes ten times as long to swap as the others: where it is not used, it is only watched.
        if len(self._streams) == 1 and has_moved:
            raise DataError(
                "The data set in ShardedIterable began to draw from NumPy's global generator in the middle of an "
                "epoch, which is different on each rank.",
                fix="draw from a generator in an attribute, or draw when iteration begins.",
            )
        if has_moved:
            self._keeps_numpy = True
        elif self._has_begun:
            del self._streams[1:]
        self._has_begun = True


@dataclass
class CollateShare:
    """Collates a batch of `IterableShare`, with random numbers that depend on the batch alone.

    Attributes:
        function: The user's `collate_fn`.
        key: Key of this rank's random numbers.
        first: Number of the first global batch.
    """

    function: Callable[[AnyBatch], AnyBatch]
    key: bytes
    first: int
    is_batched: bool

    def __call__(self, given: _Place) -> tuple[AnyBatch, int]:
        """Return the batch and the digest of the order."""
        samples, number, order = given
        if isinstance(samples, NoBatch):
            return samples, order
        if not self.is_batched:
            samples = samples[0]
        if self.function in (default_collate, default_convert):
            return self.function(samples), order
        with RngStream(self.key + (self.first + number).to_bytes(8, "little")):
            return self.function(samples), order


def digest(samples: list[AnyBatch]) -> int:
    """Return a number that distinguishes samples, as far as they consist of tensors, numbers and text."""
    plain = repr([_plain(sample) for sample in samples[:8]]).encode()
    return zlib.crc32(plain, fingerprint_batch(samples) or 0)


def _plain(value: Tree) -> Tree:
    if isinstance(value, dict):
        return {str(name): _plain(one) for name, one in list(value.items())[:16]}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value[:16]]
    if isinstance(value, str | bytes):
        return value[:256]
    return value if isinstance(value, bool | int | float) else None
