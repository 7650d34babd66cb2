"""`CombinedSource`: several loaders, read side by side or one after the other, as one."""

from __future__ import annotations

import math
from collections.abc import Sequence

from typing_extensions import override

from ...errors import DataError
from ...protocols import Batch, Indices, Loaders, StateDict
from ..tree import unflatten
from .base import Source


def combined_length(lengths: Sequence[int | float], mode: str) -> int | float:
    """Return how many batches loaders of these lengths have together; `math.inf` stands for an unknown length."""
    if not lengths:
        return 0
    if mode == "min_size":
        return min(lengths)
    return sum(lengths) if mode == "sequential" else max(lengths)


def no_batches(number: int, loader: Loaders, *, is_reread: bool = False) -> DataError:
    """Return the error for a loader of a collection that has no batch for it."""
    return DataError(
        f"Loader {number} of the collection ({type(loader).__name__}) yields no batches"
        f"{' when reread' if is_reread else ''}.",
        fix="pass loaders that can be iterated again and again, or CombinedLoader(..., mode='min_size')."
        if is_reread
        else "leave it out, or pass CombinedLoader(..., mode='max_size').",
    )


class CombinedSource(Source):
    """A collection of loaders; its batches have the collection's shape (in mode "sequential", the loader's own).

    Args:
        loaders: The collection: nested lists, tuples and dicts of loaders.
        sources: A source for each loader, in order.
        mode: As in `CombinedLoader`.
        limits: The most batches to take from each loader; None: all.
    """

    kind = "combined"

    def __init__(
        self, loaders: Loaders, sources: Sequence[Source], *, mode: str, limits: Sequence[int | float | None]
    ) -> None:
        super().__init__(loaders)
        self._sources = list(sources)
        self._mode = mode
        self._limits = [math.inf if limit is None else limit for limit in limits]
        self._is_done = [False] * len(self._sources)
        self._current = 0
        self.length = self._find_length()

    @override
    def begin(self, epoch: int) -> None:
        self._loaded = None
        self._open(epoch)
        for number in range(len(self._sources)):
            if self._mode != "sequential" or number == 0:
                self._begin(number)
        self.length = self._find_length()

    @override
    def resume(self, epoch: int) -> None:
        state = self._loaded
        assert state is not None
        self._loaded = None
        self._open(epoch)
        self.position = state["position"]
        self._is_done = list(state["is_done"])
        self._current = state["current"]
        for source, source_state in zip(self._sources, state["sources"], strict=True):
            if source_state["is_open"]:
                source.resume(epoch)
        self.length = self._find_length()

    def _open(self, epoch: int) -> None:
        self._epoch = epoch
        self.position, self._is_open = 0, True
        self._is_done = [False] * len(self._sources)
        self._current = 0

    def _begin(self, number: int) -> None:
        self._sources[number].begin(self._epoch)

    def _find_length(self) -> int | None:
        lengths = [math.inf if source.length is None else source.length for source in self._sources]
        if math.inf in lengths:
            return None
        lengths = [min(*pair) for pair in zip(lengths, self._limits, strict=True)]
        if self._mode == "max_size_cycle":  # a loader that was restarted no longer counts
            lengths = [length for length, is_done in zip(lengths, self._is_done, strict=True) if not is_done]
            return int(max(lengths, default=self.position))
        if self._mode == "sequential" and self._sources:
            # What was given of earlier ones, perhaps to another number of processes, is in the position.
            ahead = sum(lengths[self._current :]) - self._sources[self._current].position
            return int(self.position + ahead)
        return int(combined_length(lengths, self._mode))

    def _has(self, number: int) -> bool:
        source = self._sources[number]
        return source.position < self._limits[number] and source.has_next()

    @override
    def has_next(self) -> bool:
        if not self._is_open:
            return False
        numbers = range(len(self._sources))
        if self._mode == "min_size":
            return all(self._has(number) for number in numbers)
        if self._mode == "max_size":
            return any(self._has(number) for number in numbers)
        if self._mode == "sequential":
            return self._go_to_next_with_data()
        for number in numbers:
            if not self._is_done[number]:
                if self._has(number):
                    return True
                self._is_done[number] = True
        return False

    def _go_to_next_with_data(self) -> bool:
        while not self._has(self._current):
            if self._current + 1 == len(self._sources):
                return False
            self._sources[self._current].close()
            self._current += 1
            self._begin(self._current)
        return True

    @override
    def take(self) -> Batch:
        if self._mode == "sequential":
            if not self._go_to_next_with_data():
                raise StopIteration
            batch = self._sources[self._current].take()
        else:
            batch = unflatten(self.loader, [self._take_from(number) for number in range(len(self._sources))])
        self.position += 1
        return batch

    def _take_from(self, number: int) -> object:
        source = self._sources[number]
        if not self._has(number):
            if self._mode == "max_size":
                return None
            self._is_done[number] = True
            self._begin(number)
            if not self._has(number):
                raise no_batches(number, source.loader, is_reread=bool(self.position))
        return source.take()

    @override
    def latest_indices(self, back: int = 0) -> Indices:
        if self._mode == "sequential":
            return self._sources[self._current].latest_indices(back)
        return unflatten(self.loader, [source.latest_indices(back) for source in self._sources])

    @override
    def announce_epoch(self, epoch: int) -> None:
        for source in self._sources:
            source.announce_epoch(epoch)

    @override
    def close(self) -> None:
        for source in self._sources:
            source.close()
        self._is_open = False

    @override
    def pin_batches(self) -> None:
        for source in self._sources:
            source.pin_batches()

    @override
    def shut_down(self) -> None:
        for source in self._sources:
            source.shut_down()
        self._is_open = False

    @override
    def can_go_back(self, back: int) -> bool:
        return back <= self.position and all(
            count == 0 or source.can_go_back(count)
            for source, count in zip(self._sources, self._went_ahead(back), strict=True)
        )

    def _went_ahead(self, back: int) -> list[int]:
        """Return how many of the last `back` batches came from each loader, not counting restarted ones."""
        if self._mode == "sequential":
            return [back if number == self._current else 0 for number in range(len(self._sources))]
        if self._mode == "max_size_cycle":
            return [back] * len(self._sources)
        return [max(0, source.position - (self.position - back)) for source in self._sources]

    @override
    def state_dict(self, back: int = 0) -> StateDict:
        if self._loaded is not None:
            return self._loaded
        is_over = self._is_over()
        for source, limit in zip(self._sources, self._limits, strict=True):
            source.most = source.position if is_over else limit
        return {
            "kind": self.kind,
            "is_open": self._is_open,
            "is_at_end": self.length is not None and self.position - back >= self.length,
            "epoch": self._epoch,
            "position": self.position - back,
            "mode": self._mode,
            "is_done": list(self._is_done),
            "current": self._current,
            "sources": [
                source.state_dict(count) for source, count in zip(self._sources, self._went_ahead(back), strict=True)
            ],
        }

    def _is_over(self) -> bool:
        """Return whether the epoch has ended for certain; asks no loader, which might draw."""
        if self.position >= self.most:
            return True
        has_ended = [
            source.length is not None and source.position >= min(source.length, limit)
            for source, limit in zip(self._sources, self._limits, strict=True)
        ]
        if self._mode == "max_size_cycle":
            return all(ended or done for ended, done in zip(has_ended, self._is_done, strict=True))
        return self._mode == "min_size" and any(has_ended)

    def _load(self, state: StateDict) -> None:
        count = len(state["sources"])
        if count != len(self._sources) or state["mode"] != self._mode:
            raise DataError(
                f"The checkpoint has the positions of {count} loaders in mode {state['mode']!r}; the training data is "
                f"{len(self._sources)} loaders in mode {self._mode!r}.",
                fix="resume with the collection of loaders that the run had.",
            )
        for source, source_state in zip(self._sources, state["sources"], strict=True):
            source.load_state_dict(source_state)
        self._is_open = False
        self._loaded = state
