"""`IndexStream`: the order of samples; the user's sampler, read one batch of indices at a time."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sized
from numbers import Integral
from typing import cast

from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from ...errors import DataError
from ...messages import counted
from ...protocols import AnySampler, Indices, StateDict
from ..rng import RngStream, capture_rng, kinds_that_moved
from ..worker import Numbered

_END: Indices = object()
# Python may change how it hashes tuples of integers: digests are compared only where this value is equal.
_HASH_CHECK = hash((1, 2, 3))
# The digest is updated once in this many batches, because one larger update is cheaper.
_FOLD_AT = 1024
# The digest is known for this many batches back: a step that fails is repeated from its beginning.
_MOST_BACK = 512


class IndexStream:
    """Stands in a DataLoader where its batch sampler (or sampler, without automatic batching) was, and wraps that one.

    It reads indices ahead when asked to, never data: so the end of an epoch is known in time even if the sampler has
    no length. The first batch of indices is drawn from the global generators, as in a hand-written loop, and this is
    where nearly every sampler draws all that it draws. A sampler that continues to draw does so from its own
    stream: its order then depends on nothing that training draws in between, and can be found again without training
    again.

    Args:
        sampler: The user's sampler or batch sampler.
        most_in_flight: How many batches of indices a loader may hold that were not given to the user yet.

    Attributes:
        pulled: Batches of indices taken from the sampler in this epoch.
        draws_only_at_start: Whether the sampler is one of torch's own, whose length can be trusted and which needs no
            random numbers of its own.
    """

    def __init__(self, sampler: AnySampler, most_in_flight: int = 1) -> None:
        self.sampler = sampler
        self.pulled = 0
        self.draws_only_at_start = draws_only_at_start(sampler)
        self._keep = most_in_flight + _MOST_BACK
        self._handed: deque[Indices] = deque()  # handed to the loader and not yet in the digest
        self._folded = 0
        self._digest = 0
        self._ahead: deque[Indices] = deque()
        self._inner: Iterator[Indices] = iter(())
        self._stream: RngStream | None = None
        self._moved: set[str] = set()
        self._key = b""
        self._epoch = 0
        self._is_numbered = False
        self._to_skip = 0
        self._regroup: int | None = None
        self._expected: StateDict = {}
        self._rewind: Callable[[], None] | None = None
        self._problem: DataError | None = None
        self._has_ended = False

    def prepare(self, epoch: int, key: bytes, *, is_numbered: bool) -> None:
        """Say which epoch the next `iter` begins.

        Args:
            epoch: The epoch's number, which workers pass to the data set's `set_epoch`.
            key: What the epoch's random numbers depend on.
            is_numbered: Whether indices go to worker processes, as `Numbered`.
        """
        self._epoch = epoch
        self._key = key
        self._is_numbered = is_numbered
        self._to_skip = 0
        self._rewind = None
        self._problem = None

    def skip(
        self, count: int, expected: StateDict, rewind: Callable[[], None] | None, *, regroup: int | None = None
    ) -> None:
        """Let the next `iter` begin after `count` batches of indices, if they have the expected digest.

        Args:
            count: Batches that were given before the stop.
            expected: What `fingerprint` returned then.
            rewind: Called whenever iteration begins.
            regroup: How many samples a batch had then, where it was another number.
        """
        self._to_skip = count
        self._regroup = regroup
        self._expected = expected
        self._rewind = rewind

    def check(self) -> None:
        """Raise what skipping found. Not raised at once: skipping happens while the loader starts its workers.

        Raises:
            DataError: The sampler returned other indices than before the stop.
        """
        self._rewind = None  # it refers back to the loader's iterator: a cycle would delay the end of its workers
        if self._problem is not None:
            raise self._problem

    def fingerprint(self, position: int) -> StateDict:
        """Return what identifies the indices of the epoch's first batches, and their order.

        Args:
            position: Number of batches that were given to the user.

        Returns:
            A digest of None if it is not known that far back; then nothing is compared on resume.
        """
        if position < self._folded:
            return {"digest": None, "hash_check": _HASH_CHECK}
        self._fold(position - self._folded)
        return {"digest": self._digest, "hash_check": _HASH_CHECK}

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[Indices]:
        if self._rewind is not None:
            self._rewind()
        self.pulled = self._folded = self._digest = 0
        self._handed.clear()
        self._ahead.clear()
        self._stream = None
        self._has_ended = False
        if self.draws_only_at_start:
            self._inner = iter(self.sampler)
        else:
            before = capture_rng()
            self._inner = iter(self.sampler)
            self._moved = kinds_that_moved(before, capture_rng())
        return self._hand_out()

    def _hand_out(self) -> Iterator[Indices]:
        if self._to_skip:
            self._skip()
        while True:
            index = self._ahead.popleft() if self._ahead else self._pull()
            if index is _END:
                return
            self._handed.append(index)
            if len(self._handed) > _FOLD_AT + self._keep:
                self._fold(len(self._handed) - self._keep)
            if self._is_numbered:
                number = self._folded + len(self._handed)
                yield Numbered(index, self._epoch, self._key + number.to_bytes(8, "little"))
            else:
                yield index

    def look_ahead(self, position: int, count: int = 1) -> int:
        """Return how many batches are still to be given, at most `count`; reads indices as far as needed.

        Args:
            position: Number of batches that were given to the user.
            count: Where to stop.
        """
        if self._to_skip:
            self._skip()
            position = self._folded
        known = self._folded + len(self._handed) - position + len(self._ahead)
        while known < count:
            index = self._pull()
            if index is _END:
                return known
            self._ahead.append(index)
            known += 1
        return count

    @property
    def is_exhausted(self) -> bool:
        """Whether the sampler is exhausted."""
        return self._has_ended

    def pull_up_to(self, pulled: int, *, is_exhausted: bool = False) -> None:
        """Read indices ahead until as many were taken from the sampler as before the stop.

        Args:
            pulled: How many were taken then.
            is_exhausted: Whether the sampler was read to its end; then it may have drawn once more.
        """
        while self.pulled < pulled or is_exhausted:
            index = self._pull()
            if index is _END:
                break
            self._ahead.append(index)

    def find(self, position: int) -> Indices:
        """Return the indices of the batch that was given last, after this many; None if they are no longer known."""
        place = position - self._folded - 1
        return self._handed[place] if 0 <= place < len(self._handed) else None

    def has_ended(self, position: int) -> bool:
        """Return whether the sampler is known to have ended and every batch was given."""
        return self._has_ended and not self._ahead and position >= self._folded + len(self._handed)

    def _fold(self, count: int) -> None:
        """Take the oldest batches of indices into the digest."""
        digest, handed = self._digest, self._handed
        for _ in range(count):
            digest = _fold(digest, handed.popleft())
        self._digest = digest
        self._folded += count

    def _pull(self) -> Indices:
        if self._has_ended:
            return _END
        if self._stream is not None:
            with self._stream:
                index = next(self._inner, _END)
        elif self.pulled or self.draws_only_at_start:
            index = next(self._inner, _END)
        else:
            index = self._first_pull()
        if index is _END:
            self._has_ended = True
        else:
            self.pulled += 1
            if type(index) is list and not self.draws_only_at_start:
                return index.copy()  # a sampler may fill one list again and again
        return index

    def _first_pull(self) -> Indices:
        before = capture_rng()
        index = next(self._inner, _END)
        kinds = self._moved | kinds_that_moved(before, capture_rng())
        if kinds:
            self._stream = RngStream(self._key + b"sampler", kinds)
        return index

    def _skip(self) -> None:
        count, self._to_skip = self._to_skip, 0
        regroup, before, loose = self._regroup, 0, list[Indices]()
        for number in range(count):
            index = self._pull()
            if index is _END:
                self._problem = DataError(
                    f"The sampler {type(self.sampler).__name__} ended after {counted(number, 'batch')}; before the "
                    f"stop it had yielded {count} in this epoch.",
                    fix=_OTHER_ORDER,
                )
                return
            self._digest = _fold(self._digest, index)
            self._folded += 1
            if regroup is not None:
                loose += cast("list[Indices]", index)  # of a BatchSampler
                while len(loose) >= regroup:
                    before = _fold(before, loose[:regroup])
                    del loose[:regroup]
        digest = self._digest if regroup is None else before
        if self._expected["hash_check"] == _HASH_CHECK and self._expected["digest"] not in (None, digest):
            self._problem = DataError(
                f"The sampler {type(self.sampler).__name__} returned other indices for the epoch's first {count} "
                "batches than before the stop, so the epoch cannot continue from its position.",
                fix=_OTHER_ORDER,
            )


_OTHER_ORDER = (
    "let the order depend only on the global generators, on a generator in an attribute, or on set_epoch; or give the "
    "sampler state_dict and load_state_dict; and resume with the same data, batch size and sampler arguments."
)


def count_indices(index: Indices) -> int | None:
    """Return how many samples a batch sampler has chosen; None where its batches have no length."""
    return len(index) if isinstance(index, Sized) else None


def draws_only_at_start(sampler: AnySampler) -> bool:
    """Return whether this is one of torch's samplers, which use the global generators for the first indices only.

    A subclass may do anything, so it does not count.
    """
    if type(sampler) is BatchSampler:
        return draws_only_at_start(sampler.sampler)
    return type(sampler) in _DRAW_AT_START


_DRAW_AT_START = frozenset(
    {
        DistributedSampler,
        RandomSampler,
        SequentialSampler,
        SubsetRandomSampler,
        WeightedRandomSampler,
        list,
        range,
        tuple,
    }
)


def _fold(digest: int, index: Indices) -> int:
    """Return a new digest that depends on the old one and on a batch of indices, equal in every process."""
    if type(index) is int:
        return hash((digest, index))
    if type(index) is list and index and type(index[0]) is int and type(index[-1]) is int:
        try:
            return hash((digest, *index))
        except TypeError:
            pass
    return zlib.crc32(_describe(index).encode(), digest & 0xFFFFFFFF)


def _describe(index: Indices) -> str:
    """Return a text that names indices of any kind without addresses."""
    if isinstance(index, (list, tuple)):
        return f"[{','.join(map(_describe, index))}]"
    if isinstance(index, Integral):
        return str(int(index))
    if isinstance(index, (str, bytes, float, slice)):
        return repr(index)
    if isinstance(index, Tensor) or hasattr(index, "tolist"):
        return str(index.tolist())
    if isinstance(index, dict):
        return f"{{{','.join(f'{_describe(key)}:{_describe(value)}' for key, value in index.items())}}}"
    return type(index).__name__
