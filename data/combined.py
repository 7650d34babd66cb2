"""`CombinedLoader`: several loaders that are read as one."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ..errors import ConfigError, DataError, ModuleError, nearest
from ..protocols import AnyBatch, AnyLoaders, AnySampler, Batch, Loader, Loaders, StateDict, Stateful
from .limit import find_length
from .sources.combined import combined_length, no_batches
from .tree import flatten_loaders, map_loaders, unflatten

MODES = ("min_size", "max_size_cycle", "max_size", "sequential")
_NOTHING: object = object()


class CombinedLoader:
    """Iterates over a collection of loaders, and yields triples `(batch, batch_idx, dataloader_idx)`.

    ================  =====================================================  =======================
    mode              batches                                                length
    ================  =====================================================  =======================
    min_size          the collection's shape, until the shortest ends        that of the shortest
    max_size_cycle    the same, shorter ones begin again, until the longest  that of the longest
    max_size          the same, None for those that have ended               that of the longest
    sequential        those of each loader in turn; `batch_idx` counts       the sum
                      within the loader that `dataloader_idx` names
    ================  =====================================================  =======================

    Args:
        iterables: A loader, or nested lists, tuples and dicts of loaders.
        mode: One of the four above.

    Raises:
        ConfigError: The mode is unknown.
        DataError: In iteration with "min_size" or "max_size_cycle": a loader yields no batches.
    """

    def __init__(self, iterables: Loaders, mode: str = "min_size") -> None:
        if mode not in MODES:
            raise ConfigError(
                f"Expected mode to be one of {', '.join(MODES)}, got {mode!r}{nearest(str(mode), MODES)}.",
                fix="pass one of these to CombinedLoader.",
            )
        self.mode = mode
        self._iterables = iterables
        self._flattened: list[AnyLoaders] = flatten_loaders(iterables)
        for loader in self._flattened:
            if not (hasattr(loader, "__iter__") or hasattr(loader, "__getitem__")):
                raise ModuleError(
                    f"Expected loaders that can be iterated in a CombinedLoader, got {type(loader).__name__}.",
                    fix="pass loaders, or nested lists, tuples and dicts of loaders.",
                )
        self._limits: int | float | list[int | float | None] | None = None
        self._is_begun = False
        self._iterators: list[Iterator[Batch]] = []
        self._latest: Iterator[tuple[AnyBatch, int, int]] | None = None  # the iteration that was begun last

    @property
    def iterables(self) -> AnyLoaders:
        """The collection, in its original structure."""
        return self._iterables

    @property
    def flattened(self) -> list[AnyLoaders]:
        """The loaders, in order; can be set to the same number of others."""
        return self._flattened

    @flattened.setter
    def flattened(self, loaders: list[AnyLoaders]) -> None:
        if len(loaders) != len(self._flattened):
            raise ConfigError(
                f"Expected {len(self._flattened)} loaders in flattened of the CombinedLoader, got {len(loaders)}.",
                fix="set it to a list with as many loaders.",
            )
        self._iterables = unflatten(self._iterables, loaders)
        self._flattened = list(loaders)

    @property
    def limits(self) -> int | float | list[int | float | None] | None:
        """Maximum number of batches: one for all loaders, a list with one for each, or None for no limit."""
        return self._limits

    @limits.setter
    def limits(self, limits: int | float | list[int | float | None] | None) -> None:
        if isinstance(limits, (list, tuple)) and len(limits) != len(self._flattened):
            raise ConfigError(
                f"Expected {len(self._flattened)} numbers in limits of the CombinedLoader, got {len(limits)}.",
                fix="set limits to a number, to None, or to a list with one number for each loader.",
            )
        self._limits = list(limits) if isinstance(limits, (list, tuple)) else limits

    @property
    def sampler(self) -> AnySampler:
        """The loaders' samplers, in the collection's shape; None for a loader without one."""
        return map_loaders(lambda loader: getattr(loader, "sampler", None), self._iterables)

    @property
    def batch_sampler(self) -> AnySampler:
        """The loaders' batch samplers, in the collection's shape; None for a loader without one."""
        return map_loaders(lambda loader: getattr(loader, "batch_sampler", None), self._iterables)

    def __len__(self) -> int:
        """Return the number of batches.

        Raises:
            DataError: Iteration has not begun.
            NotImplementedError: A loader has no length.
        """
        if not self._is_begun:
            raise DataError(
                "len() of a CombinedLoader is known only once it is iterated.", fix="call iter(combined_loader) first."
            )
        return self._count()

    def _count(self) -> int:
        lengths = [_length(loader) for loader in self._flattened]
        if None in lengths:
            unsized = type(self._flattened[lengths.index(None)]).__name__
            raise NotImplementedError(f"CombinedLoader has no length, because {unsized} has none.")
        limits = self._all_limits()
        capped = [min(length, limit) for length, limit in zip(lengths, limits, strict=True) if length is not None]
        return int(combined_length(capped, self.mode))

    def _all_limits(self) -> list[int | float]:
        limits = self._limits if isinstance(self._limits, list) else [self._limits] * len(self._flattened)
        return [math.inf if limit is None else limit for limit in limits]

    def __iter__(self) -> Iterator[tuple[AnyBatch, int, int]]:
        self._is_begun = True
        if self.mode == "sequential":
            self._latest = self._sequential()
        else:
            self._iterators = [_batches(loader) for loader in self._flattened]  # now: a DataLoader draws when it begins
            self._latest = self._parallel(self._iterators)
        return self._latest

    def __next__(self) -> tuple[AnyBatch, int, int]:
        """Return the next triple of the iteration that was begun last."""
        if self._latest is None:
            raise StopIteration
        return next(self._latest)

    def _sequential(self) -> Iterator[tuple[Batch, int, int]]:
        for dataloader_idx, (loader, limit) in enumerate(zip(self._flattened, self._all_limits(), strict=True)):
            if limit <= 0:
                continue
            iterator = _batches(loader)
            self._iterators = [iterator]
            for batch_idx, batch in enumerate(iterator):
                yield batch, batch_idx, dataloader_idx
                if batch_idx + 1 >= limit:
                    break

    def _parallel(self, iterators: list[Iterator[Batch]]) -> Iterator[tuple[Batch, int, int]]:
        loaders, limits = self._flattened, self._all_limits()
        taken = [0] * len(loaders)
        has_ended = [False] * len(loaders)
        batch_idx = 0

        def take(number: int) -> Batch:
            item = next(iterators[number], _NOTHING) if taken[number] < limits[number] else _NOTHING
            taken[number] += item is not _NOTHING
            return item

        while loaders:
            items = []
            for number in range(len(loaders)):
                item = _NOTHING if has_ended[number] and self.mode == "max_size" else take(number)
                if item is _NOTHING:
                    has_ended[number] = True
                    if not batch_idx and limits[number] > 0 and self.mode != "max_size":
                        self._refuse_empty(number)
                    if self.mode == "min_size" or all(has_ended):
                        return
                    if self.mode == "max_size_cycle":
                        iterators[number] = _batches(loaders[number])
                        taken[number] = 0
                        item = take(number)
                        if item is _NOTHING:
                            if limits[number] > 0:
                                self._refuse_empty(number, is_reread=True)
                            return
                items.append(None if item is _NOTHING else item)
            yield unflatten(self._iterables, items), batch_idx, 0
            batch_idx += 1

    def _refuse_empty(self, number: int, *, is_reread: bool = False) -> None:
        loader = self._flattened[number]
        # One rank's share of a loader may be empty where the loader is not.
        if not find_length(getattr(loader, "loader", loader)):
            raise no_batches(number, loader, is_reread=is_reread)

    def __getstate__(self) -> StateDict:
        return {**self.__dict__, "_iterators": [], "_latest": None}  # they cannot be copied or pickled

    def reset(self) -> None:
        """Drop the iterators, so that worker processes end."""
        self._iterators = []
        self._latest = None
        self._is_begun = False
        for loader in self._flattened:
            if getattr(loader, "_iterator", None) is not None:
                loader._iterator = None  # persistent workers of a DataLoader end with it

    def state_dict(self) -> list[StateDict]:
        """Return the states of the loaders that have `state_dict`, in order."""
        return [loader.state_dict() for loader in self._stateful()]

    def load_state_dict(self, states: list[StateDict]) -> None:
        """Restore the loaders' states.

        Raises:
            DataError: There are more or fewer states than loaders that take one.
        """
        loaders = self._stateful()
        if len(states) != len(loaders):
            raise DataError(
                f"CombinedLoader has {len(loaders)} loaders with a state, but {len(states)} states were given.",
                fix="load the state of a CombinedLoader over the same loaders.",
            )
        for loader, state in zip(loaders, states, strict=True):
            loader.load_state_dict(state)

    def _stateful(self) -> list[Stateful]:
        return [
            loader
            for loader in self._flattened
            if callable(getattr(loader, "state_dict", None)) and callable(getattr(loader, "load_state_dict", None))
        ]


def _length(loader: Loaders) -> int | None:
    try:
        return loader._count() if isinstance(loader, CombinedLoader) else find_length(loader)
    except NotImplementedError:
        return None


def _batches(loader: Loader) -> Iterator[Batch]:
    """Iterate over a loader of the collection; of one that is combined itself, without the two indices."""
    return (batch for batch, _, _ in loader) if isinstance(loader, CombinedLoader) else iter(loader)
