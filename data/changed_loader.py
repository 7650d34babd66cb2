"""DataLoaders with other attributes, which torch does not let be assigned."""

from __future__ import annotations

import copy
from typing import Any, TypeVar

from .worker import SeedingDataset, WorkerInit

__all__ = ["change_loader", "changed_loader", "with_indices"]

L = TypeVar("L")


def changed_loader(loader: L, **changes: Any) -> L:  # Any: values of attributes
    """Return a copy of a DataLoader with these attributes, and without the iterator of persistent workers."""
    return change_loader(copy.copy(loader), **{"_iterator": None, **changes})


def change_loader(loader: L, **changes: Any) -> L:  # Any: as above
    """Set attributes of a DataLoader, and return it."""
    for name, value in changes.items():
        object.__setattr__(loader, name, value)
    return loader


def with_indices(loader: L, indices: object, *, seeds_workers: bool) -> L:
    """Return a copy of a DataLoader that reads these indices.

    Args:
        loader: With a map-style data set.
        indices: Stands for its sampler, or for its batch sampler if it has one.
        seeds_workers: Whether the workers draw for each batch by the number that comes with its indices.
    """
    given: Any = loader
    name = "sampler" if given.batch_sampler is None else "batch_sampler"
    seeded = {"dataset": SeedingDataset(given.dataset), "worker_init_fn": WorkerInit(given.worker_init_fn)}
    return changed_loader(loader, **{name: indices}, **(seeded if seeds_workers else {}))
