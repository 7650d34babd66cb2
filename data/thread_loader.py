"""`ThreadDataLoader`: a DataLoader that prefetches batches in threads of this process."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, cast

from torch.utils.data import DataLoader, IterableDataset, IterDataPipe, MapDataPipe
from torch.utils.data._utils.pin_memory import pin_memory
from torch.utils.data.dataloader import _BaseDataLoaderIter, _SingleProcessDataLoaderIter

from ..errors import ConfigError
from ..protocols import AnyBatch, AnyDataset, Indices
from .rng import find_generators


class ThreadDataLoader(DataLoader[AnyBatch]):
    """Prefetch batches in threads, in the order of the sampler, for a map-style data set.

    Threads need no pickling, no copies between processes and no start-up time. They help where reading a sample
    releases Python's lock (files, image decoders, NumPy, torch), and on builds of Python and torch without that lock. A
    data set in pure Python is faster with `num_workers`.

    Indices are drawn in the thread that iterates, so that order and resume are exact. Samples are read in any order and
    at the same time. So the data set must not change itself while it is read, and must not draw from generators that
    samples share: make one from the index, `torch.Generator().manual_seed(index)`.

    An error of the data set is raised with a note that names the sample.

    Args:
        dataset: A map-style data set.
        *args: Positional arguments of DataLoader.
        num_threads: Number of threads; each creates one batch at a time.
        prefetch_batches: Number of batches to prefetch; None is twice `num_threads`.
        **kwargs: Keyword arguments of DataLoader. With `pin_memory=True`, the threads pin the batches.

    Raises:
        ConfigError: The data set is iterable, or holds a random number generator; or an argument is out of range.
    """

    def __init__(
        self, dataset: AnyDataset, *args: Any, num_threads: int = 4, prefetch_batches: int | None = None, **kwargs: Any
    ) -> None:  # Any: arguments of DataLoader
        if isinstance(dataset, (IterableDataset, IterDataPipe, MapDataPipe)):
            raise ConfigError(
                f"Expected a map-style data set for ThreadDataLoader, got {type(dataset).__name__}, which is iterable.",
                fix="define __getitem__ and __len__, or use a DataLoader with num_workers.",
            )
        if num_threads < 1 or (prefetch_batches is not None and prefetch_batches < 1):
            raise ConfigError(
                f"Expected num_threads and prefetch_batches of at least 1 for ThreadDataLoader, got {num_threads} and "
                f"{prefetch_batches}.",
                fix="pass for example num_threads=4, or use a DataLoader.",
            )
        generators = find_generators(dataset=dataset)
        if generators:
            raise ConfigError(
                "Expected a data set without random number generators for ThreadDataLoader, got "
                f"{type(dataset).__name__} with {next(iter(generators))}: threads would draw from it in any order.",
                fix="make a generator from the index of each sample, or use num_workers.",
            )
        super().__init__(dataset, *args, **kwargs)
        if self.num_workers:
            raise ConfigError(
                f"Expected no worker processes for ThreadDataLoader, got num_workers={self.num_workers}.",
                fix="leave out num_workers, or use a DataLoader.",
            )
        self.num_threads = num_threads
        self.prefetch_batches = 2 * num_threads if prefetch_batches is None else prefetch_batches

    def _get_iterator(self) -> _BaseDataLoaderIter:
        return _ThreadIterator(self)

    # Read by `is_indexed`; a subclass with its own iteration does not have it.
    _get_iterator.follows_indices = True  # type: ignore[attr-defined]


class _ThreadIterator(_SingleProcessDataLoaderIter):
    """One pass; its threads end with it."""

    def __init__(self, loader: ThreadDataLoader) -> None:
        super().__init__(loader)
        self._most_ahead = loader.prefetch_batches
        self._pending: deque[Future[AnyBatch]] = deque()
        self._has_indices = True
        self._threads = ThreadPoolExecutor(loader.num_threads, thread_name_prefix="loopwright-data")
        self._make = _Maker(loader.dataset, loader.collate_fn, is_batched=self._auto_collation, pins=self._pin_memory)

    def _next_data(self) -> AnyBatch:
        while self._has_indices and len(self._pending) <= self._most_ahead:
            try:
                index = self._next_index()  # type: ignore[no-untyped-call]  # torch
            except StopIteration:
                self._has_indices = False
            else:
                self._pending.append(self._threads.submit(self._make, index))
        if not self._pending:
            self._end()
            raise StopIteration
        try:
            return self._pending.popleft().result()
        except BaseException:
            self._end()
            raise

    def _end(self) -> None:
        self._has_indices = False
        self._pending.clear()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def __del__(self) -> None:
        if hasattr(self, "_threads"):
            self._end()


class _Maker:
    """Makes one batch, in any thread.

    Args:
        dataset: The data set.
        collate: The `collate_fn` of the loader.
        is_batched: Whether an index is a list of samples.
        pins: Whether the batch goes into pinned memory.
    """

    def __init__(
        self, dataset: AnyDataset, collate: Callable[[AnyBatch], AnyBatch], *, is_batched: bool, pins: bool
    ) -> None:
        self._dataset = dataset
        self._collate = collate
        self._is_batched = is_batched
        self._pins = pins

    def __call__(self, index: Indices) -> AnyBatch:
        """Return the batch with an index of the sampler."""
        if not self._is_batched:
            samples = self._read(self._get, index, "sample")
        elif getattr(self._dataset, "__getitems__", None):
            samples = self._read(self._dataset.__getitems__, index, "samples")
        else:
            samples = [self._read(self._get, one, "sample") for one in cast("list[Indices]", index)]
        batch = self._read(lambda _: self._collate(samples), index, "collated samples")
        return pin_memory(batch) if self._pins else batch

    def _get(self, index: Indices) -> AnyBatch:
        return self._dataset[index]

    def _read(self, read: Callable[[Indices], AnyBatch], index: Indices, what: str) -> AnyBatch:
        try:
            return read(index)
        except Exception as error:
            name = threading.current_thread().name
            error.add_note(f"This was raised for {what} {index!r} of {type(self._dataset).__name__}, in thread {name}.")
            raise
