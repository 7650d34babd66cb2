"""Objects that a strategy remembers without keeping them alive."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Generic, TypeVar

__all__ = ["LiveObjects"]

T = TypeVar("T")


class LiveObjects(Generic[T]):
    """Weak references in the order in which they were added.

    Python frees a model that is part of a reference cycle whenever its garbage collector happens to run, and that is
    at another moment on each rank. Collectives must therefore never follow from iterating over this; it
    may follow from `in_use`.
    """

    def __init__(self) -> None:
        self._references: list[weakref.ref[T]] = []

    def __iter__(self) -> Iterator[T]:
        """Give what has not been freed, the newest last: possibly more on one rank than on another."""
        return iter([one for one in (reference() for reference in self._references) if one is not None])

    def in_use(self) -> list[T]:
        """Return what the program can still reach, the newest last; the same on all ranks. Takes some 0.05 s."""
        gc.collect()
        return list(self)

    def add(self, one: T) -> None:
        """Remember an object, unless it is known."""
        if all(known is not one for known in self):
            self._references = [reference for reference in self._references if reference() is not None]
            self._references.append(weakref.ref(one))

    def discard(self, one: T) -> None:
        """Forget an object."""
        self._references = [reference for reference in self._references if reference() is not one]

    def clear(self) -> None:
        """Forget all."""
        self._references = []

    def __getstate__(self) -> dict[str, object]:
        """Return an empty state: another process has none of these objects."""
        return {"_references": []}
