"""Objects that a strategy remembers without keeping them alive."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class LiveObjects(Generic[T]):
    """Weak references in the order in which they were added.

    Python frees a model that is part of a reference cycle when its garbage collector runs, which is at a different time
    on each rank. Therefore never call collectives for objects from an iteration over this; objects from `in_use` are
    the same on all ranks.
    """

    def __init__(self) -> None:
        self._references: list[weakref.ref[T]] = []

    def __iter__(self) -> Iterator[T]:
        """Yield the objects that are not freed, newest last; ranks may differ."""
        return iter([one for one in (reference() for reference in self._references) if one is not None])

    def in_use(self) -> list[T]:
        """Return the objects that are reachable, newest last; the same on all ranks. Takes about 0.05 s."""
        gc.collect()
        return list(self)

    def add(self, one: T) -> None:
        """Add an object, unless it was added before."""
        if all(known is not one for known in self):
            self._references = [reference for reference in self._references if reference() is not None]
            self._references.append(weakref.ref(one))

    def discard(self, one: T) -> None:
        """Remove an object."""
        self._references = [reference for reference in self._references if reference() is not one]

    def clear(self) -> None:
        """Remove all objects."""
        self._references = []

    def __getstate__(self) -> dict[str, object]:
        """Return an empty state, because other processes do not have these objects."""
        return {"_references": []}
