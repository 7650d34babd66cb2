"""Records of the samples that each batch of an evaluation consists of."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

from ..protocols import AnyLoaders, AnySampler, Batch, Indices, Loaders
from .distributed.evaluation import EvalShard
from .persistent_workers import PersistentWorkersLoader
from .sources.indexed import is_indexed
from .tree import change_loader
from .worker import Numbered


class IndexRecord:
    """Stands for a sampler or batch sampler, and records the indices that the loader draws from it.

    Attributes:
        latest: The indices of the batch that `following` yielded last; None where they are not known.

    A loader with workers draws indices before it yields their batches, in the same order.

    Args:
        sampler: The user's sampler.
    """

    def __init__(self, sampler: AnySampler) -> None:
        self._sampler = sampler
        self._handed: deque[list[Indices]] = deque()
        self.latest: list[Indices] | None = None

    def __iter__(self) -> Iterator[Indices]:
        self._handed.clear()
        # Not within the generator: some samplers draw when iteration begins, and their attributes are read right after.
        return self._note(iter(self._sampler))

    def _note(self, given_by_sampler: Iterator[Indices]) -> Iterator[Indices]:
        for given in given_by_sampler:
            index = given.index if isinstance(given, Numbered) else given
            self._handed.append(list(index) if isinstance(index, list | tuple) else [index])
            yield given

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_sampler":  # a copy asks before there is anything to ask
            raise AttributeError(name)
        return getattr(self._sampler, name)

    def count_latest(self) -> int | None:
        """Return how many indices `latest` has; None where they are not known."""
        return None if self.latest is None else len(self.latest)

    def following(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Yield batches of the loader, each with its indices as `latest`."""
        for batch in batches:
            self.latest = self.next()
            yield batch

    def next(self) -> list[Indices] | None:
        """Return the indices of the next batch that the loader yields; None if it did not draw any."""
        return self._handed.popleft() if self._handed else None


def record_indices(loader: Loaders) -> tuple[AnyLoaders, IndexRecord | None]:
    """Return a loader that yields the same batches, and the record of their indices in the data set.

    Args:
        loader: What `shard_eval` or `with_persistent_workers` returned. A DataLoader is copied first: the copy
            records.

    Returns:
        The loader to read from, and None where indices cannot be known: of an iterable data set, of batches in a list,
        of a DataLoader that gives batches in another order than it asked for them.
    """
    ours = loader if isinstance(loader, PersistentWorkersLoader | EvalShard) else None
    read = loader if ours is None else ours._copy
    if not isinstance(read, DataLoader) or not is_indexed(read if ours is None else ours.loader):
        return loader, None
    if not getattr(read, "in_order", True):
        return loader, None
    name = "sampler" if read.batch_sampler is None else "batch_sampler"
    record = IndexRecord(getattr(read, name))
    if ours is None:
        loader = read = copy.copy(read)
    change_loader(read, **{name: record, "_iterator": None})
    return loader, record
