"""Code that runs in DataLoader workers: each batch has its own random numbers, whichever worker makes it."""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

from torch.utils.data import get_worker_info

from ..protocols import AnyBatch, AnyDataset, AnyLoaders, AnySampler, StateDict
from .rng import find_generators, seed_generators, seed_global_generators
from .tree import changed_loader

CRASH_FILE = "LOOPWRIGHT_CRASH_FILE"
"""The variable with the path of the rank's file for Python stacks, or "stderr"; unset where the program has its own."""


L = TypeVar("L")


class Numbered(NamedTuple):
    """One batch's indices on their way to a worker, with the key of its random numbers."""

    index: Any  # what a sampler yields
    epoch: int
    key: bytes


_PLAIN = frozenset((bool, int, float, str, bytes, type(None)))
_MOST_ENTRIES = 100  # of a list or dict that is looked into; more are data
_MOST_OBJECTS = 1000


def _describe_attributes(dataset: AnyDataset) -> list[object]:
    """Return the plain values in the attributes of a data set and of what it consists of; of other objects the id.

    Two descriptions that differ show that workers with an earlier copy would read other data. Changes inside tensors,
    arrays and long lists are not seen.
    """
    found: list[object] = []
    known: set[int] = set()
    waiting = [dataset]
    while waiting and len(known) < _MOST_OBJECTS:
        value = waiting.pop()
        if type(value) in _PLAIN:
            found.append(value)
            continue
        found.append(id(value))
        if id(value) in known or isinstance(value, type | ModuleType):
            continue
        known.add(id(value))
        if isinstance(value, dict | list | tuple | set):
            found.append(len(value))
            if len(value) <= _MOST_ENTRIES:
                waiting += [*value, *value.values()] if isinstance(value, dict) else value
        waiting += list(getattr(value, "__dict__", {}).values())
    return found


class SeedingDataset:
    """The user's data set as the worker's fetcher sees it: seeds the generators, then fetches.

    Seeding by batch, not by worker, makes augmentation independent of the number of workers, of the worker that fetches
    a batch, and of what was fetched before. So a resumed run continues without re-reading.

    Args:
        dataset: The user's map-style data set.
    """

    def __init__(self, dataset: AnyDataset) -> None:
        self.dataset = dataset
        self._epoch: int | None = None
        self._generators: StateDict | None = None
        self._attributes: list[object] = []

    def has_changed(self) -> bool:
        """Whether an attribute of the user's data set has changed since the last call, in this process.

        Workers that live for several passes hold a copy as of their start: then others must be started.
        """
        before, self._attributes = self._attributes, _describe_attributes(self.dataset)
        return before != self._attributes

    def __getitems__(self, numbered: Numbered) -> AnyBatch:
        """Return the samples of a batch, before collation."""
        self._prepare(numbered)
        if getattr(self.dataset, "__getitems__", None):
            return self.dataset.__getitems__(numbered.index)
        return [self.dataset[index] for index in numbered.index]

    def __getitem__(self, numbered: Numbered) -> AnyBatch:
        self._prepare(numbered)
        return self.dataset[numbered.index]

    def _prepare(self, numbered: Numbered) -> None:
        if self._epoch != numbered.epoch:
            # A worker that lives for several epochs holds a copy that the main process's set_epoch does not reach.
            if self._epoch is not None and callable(getattr(self.dataset, "set_epoch", None)):
                self.dataset.set_epoch(numbered.epoch)
            self._epoch = numbered.epoch
        if self._generators is None:
            self._generators = find_generators(dataset=self.dataset)
        seed_global_generators(numbered.key)
        if self._generators:
            seed_generators(self._generators, numbered.key)


class WorkerInit:
    """Runs once in each worker: shows the user's data set to `get_worker_info()`, then calls the user's function.

    Before, it lets a fatal signal write the worker's Python stack into the file of its rank (fabric/watch/).
    """

    def __init__(self, user_function: Callable[[int], object] | None) -> None:
        self._user_function = user_function

    def __call__(self, worker_id: int) -> None:
        """Called by torch in the worker, before the first batch."""
        _describe_crashes()
        info = get_worker_info()
        if info is not None and isinstance(info.dataset, SeedingDataset):
            object.__setattr__(info, "dataset", info.dataset.dataset)  # WorkerInfo refuses plain assignment
        if self._user_function is not None:
            self._user_function(worker_id)


def _describe_crashes() -> None:
    """Let faulthandler take the signals that torch's own handlers have taken in this worker."""
    path = os.environ.get(CRASH_FILE)
    if path != "stderr" and not os.path.exists(path or ""):
        return
    file = 2 if path == "stderr" else os.open(str(path), os.O_WRONLY | os.O_APPEND)
    faulthandler.disable()  # inherited: its handlers for some signals were replaced
    faulthandler.enable(file=file, all_threads=True)


def with_indices(loader: L, indices: AnySampler, *, seeds_workers: bool) -> L:
    """Return a copy of a DataLoader that reads these indices.

    Args:
        loader: With a map-style data set.
        indices: Stands for its sampler, or for its batch sampler if it has one.
        seeds_workers: Whether the workers draw for each batch by the number that comes with its indices.
    """
    given: AnyLoaders = loader
    name = "sampler" if given.batch_sampler is None else "batch_sampler"
    seeded = {"dataset": SeedingDataset(given.dataset), "worker_init_fn": WorkerInit(given.worker_init_fn)}
    return changed_loader(loader, **{name: indices}, **(seeded if seeds_workers else {}))
