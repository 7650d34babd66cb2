"""`EvalLoader`: the data of an evaluation stage, with its limits, made from the user's loaders."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from ...data.combined import CombinedLoader
from ...data.limit import find_length, resolve_limit
from ...data.sources.base import announce_epoch
from ...data.sources.reread import is_one_shot
from ...data.tree import flatten_loaders, is_collection
from ...errors import ConfigError, DataError
from ...messages import warn
from ...protocols import Batch, Loader, Loaders

if TYPE_CHECKING:
    from ...data.batch_indices import IndexRecord
    from ...data.batch_size import BatchSizes


@dataclass(slots=True)
class EvalLoader:
    """The loaders of one stage, with their limits.

    Attributes:
        original: The collection as the user passed it.
        loaders: Its members in order; one loader that gives tuples for a combined mode other than sequential.
        limits: Largest number of batches of each; infinity for no limit.
        combined: The combined loader where its mode is not sequential.
        is_off: Whether the Trainer's limit is 0: nothing is evaluated, and no hook is called.
    """

    original: Loaders
    loaders: list[Loader] = field(default_factory=list)
    limits: list[int | float] = field(default_factory=list)
    combined: CombinedLoader | None = None
    is_off: bool = False
    records: dict[int, IndexRecord] = field(default_factory=dict)
    _sizes: dict[int, BatchSizes] = field(default_factory=dict)

    def sizes_of(self, index: int) -> BatchSizes:
        """Return the `BatchSizes` of a loader."""
        if index not in self._sizes:
            from ...data.batch_size import BatchSizes

            sizes = self._sizes[index] = BatchSizes(self.loaders[index])
            if sizes.needs_indices and sizes.is_batched:
                from ...data.batch_indices import record_indices

                self.loaders[index], record = record_indices(self.loaders[index])
                if record is not None:
                    sizes.follow(record.count_latest)
                    self.records[index] = record
        return self._sizes[index]

    def announce_epoch(self, epoch: int) -> None:
        """Call `set_epoch(epoch)` on samplers and data sets that have it: their order may follow the training."""
        loaders = self.original
        if isinstance(loaders, CombinedLoader):
            loaders = loaders.flattened
        for member in flatten_loaders(loaders) if is_collection(loaders) else [loaders]:
            announce_epoch(member, epoch)

    @property
    def num_batches(self) -> int | float:
        """Batches of all loaders together."""
        return sum(self.limits)

    def count_of(self, index: int) -> int | None:
        """Return the number of batches of the rank with the most, as far as this rank can know; None if unknown."""
        from ...data.distributed.evaluation import count_eval_rounds

        count, limit = count_eval_rounds(self.loaders[index]), self.limits[index]
        if count is None:
            return None
        return int(min(count, limit))

    def __iter__(self) -> Iterator[tuple[int, Iterator[Batch]]]:
        """Yield the number of each loader and its batches, up to the limit."""
        for index, limit in enumerate(self.limits):
            if limit:
                self.sizes_of(index)  # may let the loader record indices
                yield index, _take(self.loaders[index], limit)


def _take(loader: Loader, limit: int | float) -> Iterator[Batch]:
    from ...data.gather import gathering  # not imported where nothing is evaluated

    iterator = iter(gathering(loader))
    # Not the iterator itself: `enumerate` and `islice` call `iter` again, and some loaders would shuffle again then.
    batches: Iterator[Batch] = map(next, itertools.repeat(iterator))
    # islice does not request a batch beyond its limit.
    return batches if limit == math.inf else itertools.islice(batches, math.ceil(limit))


def without_shuffle(loader: Loaders, stage: str) -> Loaders:
    """Return the loader, reading in order where it shuffles: `overfit_batches` needs the same batches each epoch."""
    if isinstance(loader, DataLoader) and isinstance(loader.sampler, RandomSampler):
        warn(f"overfit_batches: the {stage} loader shuffles; it is read in order instead")
        twin = copy.copy(loader)
        sampler = SequentialSampler(loader.dataset)  # type: ignore[arg-type]  # a RandomSampler's data set is sized
        object.__setattr__(twin, "sampler", sampler)
        if isinstance(loader.batch_sampler, BatchSampler):
            batches = BatchSampler(sampler, loader.batch_sampler.batch_size, loader.batch_sampler.drop_last)
            object.__setattr__(twin, "batch_sampler", batches)
        return twin
    if isinstance(loader, Mapping):
        return {key: without_shuffle(value, stage) for key, value in loader.items()}
    if isinstance(loader, list | tuple) and any(isinstance(item, DataLoader) for item in loader):
        return type(loader)(without_shuffle(item, stage) for item in loader)
    return loader


def make_eval_loader(
    loaders: Loaders,
    limit: int | float | None,
    *,
    name: str,
    mode_error: str | None = None,
    share: Callable[[Loaders], Any] | None = None,  # Any: a loader of the given kind
    count: Callable[[Loaders], int | None] = find_length,
) -> EvalLoader:
    """Return loaders of an evaluation stage with their limits.

    Args:
        loaders: One loader, a collection of them, or a CombinedLoader.
        limit: The `limit_*_batches` argument.
        name: Name of that argument, for errors.
        mode_error: Stage that takes sequential loaders only, for its error; None where any mode is fine.
        share: Returns what this rank reads of a loader, the same at each pass; None: all of it.
        count: Returns how many batches that is on the rank with the most; None where that is unknown.
    """
    if isinstance(loaders, CombinedLoader) and loaders.mode != "sequential":
        if mode_error is not None:
            raise ConfigError(
                f"{mode_error} got a CombinedLoader with mode={loaders.mode!r}.", fix="use mode='sequential'."
            )
        shared = loaders if share is None else share(loaders)
        iter(shared)  # its length is known from here on; nothing is read yet
        return EvalLoader(loaders, [_Batches(shared)], [resolve_limit(limit, count(shared), name)], shared)
    if isinstance(loaders, CombinedLoader):
        combined = loaders
    else:  # a list of batches is one loader
        combined = CombinedLoader(loaders if is_collection(loaders) else (loaders,), "sequential")
    from ...data.persistent_workers import with_persistent_workers  # here: a program that only makes a Trainer
    from ...data.sources.in_order import in_order  # reads no data

    read: Callable[[Loaders], Any] = share or with_persistent_workers  # Any: a loader of the given kind
    members = [read(in_order(member)) for member in combined.flattened]
    own = combined.limits if isinstance(combined.limits, list) else [combined.limits] * len(members)
    limits: list[int | float] = []
    for member, own_limit in zip(members, own, strict=True):
        if not hasattr(type(member), "__iter__") and not hasattr(type(member), "__getitem__"):
            raise DataError(
                f"a loader for {name.removeprefix('limit_').removesuffix('_batches')} is {type(member).__name__}, "
                "which cannot be iterated.",
                fix="return a DataLoader, any iterable of batches, or a collection of these.",
            )
        if is_one_shot(member):
            members[len(limits)] = ReadOnce(member, name)
        if isinstance(member, CombinedLoader):
            iter(member)  # its length is known from here on
            members[len(limits)] = _Batches(member)
        most = resolve_limit(limit, count(member), name)
        limits.append(most if own_limit is None else min(most, own_limit))
    if members and limit != 0 and not any(count(member) != 0 for member in members):
        stage = name.removeprefix("limit_").removesuffix("_batches").replace("val", "validation")
        warn(f"The {stage} data has no batches: nothing is evaluated")
    original = loaders.iterables if isinstance(loaders, CombinedLoader) else loaders
    return EvalLoader(original, members, limits)


class ReadOnce:
    """An iterator that nothing can rewind, such as a generator: the second pass over it is an error."""

    def __init__(self, iterator: Iterator[Batch], name: str) -> None:
        self._iterator = iterator
        self._name = name.removeprefix("limit_").removesuffix("_batches")
        self._was_read = False

    def __iter__(self) -> Iterator[Batch]:
        if self._was_read:
            raise self.error("and it was read before")
        self._was_read = True
        return self._iterator

    def error(self, so: str) -> DataError:
        """Return the error about a second pass."""
        return DataError(
            f"a loader for {self._name} is a {type(self._iterator).__name__} object, which can be read only once, "
            f"{so}.",
            fix="pass what can be iterated again and again: a DataLoader, a list, an object of a class with __iter__.",
        )


class _Batches:
    """Iterates a CombinedLoader without the indices that it yields beside the batch."""

    def __init__(self, combined: CombinedLoader) -> None:
        self._combined = combined

    def __iter__(self) -> Iterator[Batch]:
        return (batch for batch, _, _ in self._combined)
