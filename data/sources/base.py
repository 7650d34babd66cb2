"""`Source`: the interface through which a `BatchStream` reads; each kind of loader has its own."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Final

from ...errors import DataError
from ...protocols import Batch, Indices, Loaders, StateDict
from ..limit import find_length, resolve_limit


class NoBatch:
    """The type of `NO_BATCH`."""

    def __repr__(self) -> str:
        return "NO_BATCH"

    def __reduce__(self) -> str:
        return "NO_BATCH"  # the same object also after it went through a pickle


NO_BATCH: Final = NoBatch()
"""Returned by `BatchStream.next_batch` where other processes still have a batch and this one has none."""


def position_of(state: StateDict) -> int:
    """Return how many batches a process had read; on one process, a state need not have its own entry for it."""
    return int(state["rounds"] if "rounds" in state else state["position"])


class Source(ABC):
    """One loader, read batch by batch.

    Attributes:
        length: Batches in an epoch, as the loader says; None when it does not say. A loader that has more is left
            there; one that has fewer ends its epoch early.
        position: Batches returned since the epoch began.
        ends_at_length: Whether an epoch is open that ends after `length` batches for certain, so that `has_next`
            is not needed.
        most: Where a limit ends an epoch before the loader does: nothing after it is read.

    Batches are counted as one process gets them. A run that continues with more or fewer processes, or with
    another batch size, keeps its count: `first` batches were given in the epoch before, which are `first + shift`
    batches of the loader now.
    """

    kind = "source"

    def __init__(self, loader: Loaders) -> None:
        self.loader = loader
        self.length = find_length(loader)
        self.position = 0
        self.first = 0
        self.shift = 0
        self.ends_at_length = False
        self.most: int | float = math.inf
        self._is_open = False
        self._epoch = 0
        self._loaded: StateDict | None = None  # until the epoch that it continues is entered

    @abstractmethod
    def begin(self, epoch: int) -> None:
        """Begin a pass over the loader; draws what the loader itself draws when iterated."""

    def begin_shared(self, epoch: int, shared_rng: StateDict) -> None:
        """Begin a pass, with the random numbers of rank 0 if the ranks have to draw the same."""
        self.begin(epoch)

    @abstractmethod
    def has_next(self) -> bool:
        """Return whether `take` has a batch; may fetch what `take` will return."""

    @abstractmethod
    def take(self) -> Batch:
        """Return the next batch; called once per micro-batch, where there is one."""

    def at_most(self, upto: int) -> int:
        """Return how many batches are left, at most `upto`: 0 for certain at the end, else a bound.

        Called where `ends_at_length` is False: a loader may claim to have more batches than it yields.
        """
        if self.length is not None:
            upto = min(upto, self.length - self.position)
        return upto if upto > 0 and self.has_next() else 0

    def apply_limit(self, limit: int | float | None, name: str) -> int | float:
        """Return after how many batches the open epoch ends, by a limit in the grammar of `resolve_limit`."""
        full = None if self.length is None else self.length + self.shift
        self.most = max(self.first, resolve_limit(limit, full, name) - self.shift)
        return self.most

    def count_ahead(self, upto: int) -> int | None:
        """Return exactly how many batches are left, at most `upto`; None if that takes reading them."""
        return None

    @abstractmethod
    def state_dict(self, back: int = 0) -> StateDict:
        """Return what `resume` needs, as plain values and tensors.

        Args:
            back: As of this many batches ago, where `can_go_back(back)`.
        """

    def can_go_back(self, back: int) -> bool:
        """Return whether `state_dict` can return the state of `back` batches ago, in this epoch."""
        return back <= self.position

    def load_state_dict(self, state: StateDict) -> None:
        """Keep the state for `resume` or the next `begin`.

        Raises:
            DataError: The state was made by another kind of loader.
        """
        if state.get("kind") != self.kind:
            raise DataError(
                f"Before the stop, training data came from {_DESCRIPTION.get(str(state.get('kind')), 'nowhere')}, but "
                f"{type(self.loader).__name__} is {_DESCRIPTION[self.kind]}.",
                fix="resume with the loader that the run had, or start a new run from the checkpoint's weights.",
            )
        self._load(state)

    def _load(self, state: StateDict) -> None:
        """Keep a state of the right kind."""
        self.close()
        self._loaded = state

    @abstractmethod
    def resume(self, epoch: int) -> None:
        """Begin the epoch of the loaded state and go to its position."""

    def _stay_at_end(self) -> None:
        """Let the epoch end where it was left, after `position` batches."""
        self.first, self.shift = self.position, 0
        if self.length is not None:
            self.length = self.position

    def announce_epoch(self, epoch: int) -> None:
        """Tell samplers and data sets which epoch begins."""
        announce_epoch(self.loader, epoch)

    def count_latest(self, back: int = 0) -> int | None:
        """Return how many indices the sampler returned for the latest batch; None where that is not known.

        Args:
            back: For the batch that came this number of batches before it.
        """
        return None

    def latest_indices(self, back: int = 0) -> Indices:
        """Return the indices of the latest batch in the data set; None where they are not known. As `count_latest`."""
        return None

    def describe_order(self) -> int | None:
        """Return a number that is equal on all ranks if what is distributed to them is; None if nothing is."""
        return None

    @abstractmethod
    def close(self) -> None:
        """End the pass: stop workers that do not outlive it, drop what was read ahead."""

    def pin_batches(self) -> None:  # noqa: B027  # most sources do not make batches themselves
        """Put batches into pinned memory where that costs the main thread nothing. Called before the first pass."""

    def shut_down(self) -> None:
        """Close, and stop workers that outlive a pass too."""
        self.close()


_DESCRIPTION = {
    "indexed": "a DataLoader with a map-style data set",
    "stateful": "a loader with state_dict and load_state_dict",
    "replay": "an iterable that can only be read from its start",
    "combined": "a collection of loaders",
    "iterable": "a DataLoader with a ShardedIterable",
    "fetched": "a loader that was read as Lightning reads it",
}


def announce_epoch(loader: Loaders, epoch: int) -> None:
    """Call `set_epoch(epoch)` once on each of the loader, its samplers and its data set that has it."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    parts = [
        loader,
        batch_sampler,
        getattr(batch_sampler, "sampler", None),
        getattr(loader, "sampler", None),
        getattr(loader, "dataset", None),
    ]
    announced: list[Loaders] = []
    for part in parts:
        set_epoch = getattr(part, "set_epoch", None)
        if callable(set_epoch) and not any(part is one for one in announced):
            set_epoch(epoch)
            announced.append(part)
