"""`StoreTree`: values of all ranks, combined in groups of 16 through a store, so that no rank reads all values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

FAN = 16
"""Ranks, or groups, in a group."""


class _Store(Protocol):
    """The methods of a torch.distributed store that are used."""

    def set(self, key: str, value: str, /) -> None:
        """Write a value."""
        ...

    def add(self, key: str, amount: int, /) -> int:
        """Add to a counter and return its value."""
        ...

    def check(self, keys: list[str], /) -> bool:
        """Return whether all keys exist."""
        ...

    def multi_get(self, keys: list[str], /) -> list[bytes]:
        """Return several values."""
        ...


class StoreTree:
    """Combines one value of each rank; the last rank of a group combines the group's, and posts it one level up.

    A rank needs a few messages on each level, and there are log16(size) levels. The keys are `name/<level>/<number>`,
    where level 0 has the values of ranks, and `name/<level>/<number>/count` for the arrivals below a number.

    Args:
        store: Shared by the ranks; its `add` is atomic.
        name: Prefix of the keys: the same on all ranks, and used for one combination.
        size: Number of ranks.
    """

    def __init__(self, store: _Store, name: str, size: int) -> None:
        self._store = store
        self._name = name
        self._size = size

    def post(self, rank: int, value: str, combine: Callable[[Sequence[bytes]], str] = lambda values: "") -> str | None:
        """Post the value of this rank; once.

        Args:
            rank: This rank.
            value: Its value.
            combine: Associative function that returns one value for the values of a group.

        Returns:
            The value of all ranks, on the last rank to post; None on the others.
        """
        level, number = 0, rank
        while True:
            self._store.set(self._key(level, number), value)
            level, number = level + 1, number // FAN
            below = children(level, number, self._size)
            # The counter comes after the value: the rank that counts to the end finds all values there.
            if self._store.add(f"{self._key(level, number)}/count", 1) < len(below):
                return None
            value = combine(self._store.multi_get([self._key(level - 1, one) for one in below]))
            if FAN**level >= self._size:
                return value

    def missing(self, most: int) -> list[int]:
        """Return ranks that have not posted, in order, at most `most`."""
        level = 0
        while FAN**level < self._size:
            level += 1
        return self._missing_below(max(level, 1), 0, most)

    def _missing_below(self, level: int, number: int, most: int) -> list[int]:
        found: list[int] = []
        for one in children(level, number, self._size):
            if len(found) < most and not self._store.check([self._key(level - 1, one)]):
                found += [one] if level == 1 else self._missing_below(level - 1, one, most - len(found))
        return found

    def _key(self, level: int, number: int) -> str:
        return f"{self._name}/{level}/{number}"


def children(level: int, number: int, size: int) -> range:
    """Return the numbers on the level below that belong to a number of a level >= 1."""
    count_below = -(-size // FAN ** (level - 1))
    return range(number * FAN, min((number + 1) * FAN, count_below))
