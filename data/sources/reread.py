"""`RereadSource`: any other iterable. It can only be read from its start, so a resume re-reads the epoch's batches."""

from __future__ import annotations

import copy
import itertools
import logging
from collections.abc import Iterator
from types import GeneratorType
from typing import Any, TypeVar

from torch.utils.data import DataLoader
from typing_extensions import override

from ...errors import DataError
from ...protocols import Batch, Loader, Loaders, StateDict
from ..limit import find_length
from ..rng import (
    RngStream,
    capture_generators,
    capture_rng,
    derive_key,
    find_generators,
    kinds_that_moved,
    moved_numpy,
    restore_generators,
    restore_rng,
)
from .base import Source, position_of
from .stateful import is_stateful

__all__ = ["RereadSource"]

log = logging.getLogger(__name__)
_NOTHING: object = object()

L = TypeVar("L")


class RereadSource(Source):
    """An iterable without indices and without a state of its own: generators, iterable data sets, lists of batches.

    Iteration begins and the first batch is fetched with the global generators, as in a hand-written loop; an iterable
    that draws in the main process after that draws from a stream of its own. So the same batches come when it is
    iterated again from the same start, whatever training draws in between, and a batch may be fetched before it is
    asked for (which shows the end of an epoch of unknown length). Lists and tuples of batches, and loaders
    that draw in worker processes, need no such stream.
    """

    kind = "replay"
    loader: Loader

    def __init__(self, loader: Loader) -> None:
        super().__init__(loader)
        from .in_order import in_order  # a program that only makes a Trainer reads no data

        self._iterable = without_persistent_workers(in_order(loader))
        self._is_sequence = isinstance(loader, (list, tuple))
        self._num_workers = _num_workers(loader)
        self._iterator: Iterator[Batch] = iter(())
        self._ahead: Any = _NOTHING
        self._stream: RngStream | None = None
        self._watches_numpy = False
        self._first_batches: list[Any] | None = [] if self._num_workers > 1 else None  # of the first epoch, to compare
        self._is_open = False
        self._has_ended = False
        self._was_read = False
        self._epoch = 0
        self._opening: StateDict = {}
        self._loaded: StateDict | None = None

    @override
    def begin(self, epoch: int) -> None:
        if self._loaded is not None:
            restore_generators(self._find_generators(), self._loaded["current"])
            self._loaded = None
        self._opening = {}
        if not self._is_sequence:
            self._opening = {"rng": capture_rng(), "generators": capture_generators(self._find_generators())}
        self._start(epoch)

    @override
    def resume(self, epoch: int) -> None:
        state = self._loaded
        assert state is not None
        self._opening = state["opening"]
        if state["is_at_end"]:  # nothing to give; `begin` of the next epoch needs the state
            self.position, self._is_open, self._has_ended = position_of(state), True, True
            self._stay_at_end()
            return
        if state["num_workers"] != self._num_workers:
            raise DataError(
                f"The checkpoint was made in the middle of an epoch with {state['num_workers']} workers; now there are "
                f"{self._num_workers}, and the order of an iterable data set depends on their number.",
                fix=f"resume with num_workers={state['num_workers']}, or from a checkpoint at the end of an epoch.",
            )
        self._loaded = None
        if is_one_shot(self.loader):
            raise self._is_spent(f"so the run cannot continue after the {state['position']} batches that it has seen")
        if self._is_sequence:
            self._start(epoch)
            self._iterator = itertools.islice(self.loader, state["position"], None)
            self.first = position_of(state)
            self.shift = state["position"] - self.first
            self.length = find_length(self.loader)
            assert self.length is not None
            self.length -= self.shift
            self.position = self.first
        else:
            restore_rng(self._opening["rng"])
            restore_generators(self._find_generators(), self._opening["generators"])
            self._start(epoch)
            self._read_again(state["position"])
            self.position = state["position"]

    def _start(self, epoch: int) -> None:
        if self._was_read and is_one_shot(self.loader):
            raise self._is_spent(f"so epoch {epoch} has no data")
        self._was_read = True
        self.length = find_length(self.loader)
        self._epoch = epoch
        self.position, self._is_open, self._has_ended = 0, True, False
        self.first = self.shift = 0
        self._stream = None
        self._ahead = _NOTHING
        self._iterator = iter(())  # ends the workers of an epoch that was cut short
        if self._is_sequence or self._num_workers:
            self._iterator = iter(self._iterable)
            self.ends_at_length = self._is_sequence
            return
        self._iterator = iter(self._iterable)
        self._ahead = next(self._iterator, _NOTHING)
        self._has_ended = self._ahead is _NOTHING
        self._make_stream(with_numpy="numpy" in kinds_that_moved(self._opening["rng"], capture_rng()))

    def _make_stream(self, *, with_numpy: bool) -> None:
        # NumPy's state takes ten times as long to swap as the others: it is left out where it is not used.
        kinds = ("python", "torch", "numpy") if with_numpy else ("python", "torch")
        self._stream = RngStream(derive_key(self._opening["rng"], self._epoch, "replay", self.position), kinds)
        self._watches_numpy = not with_numpy

    def _is_spent(self, so: str) -> DataError:
        return DataError(
            f"The training data is a {type(self.loader).__name__} object, which can be read only once, {so}.",
            fix="pass what can be iterated again and again: a DataLoader, a list, an object of a class with __iter__.",
        )

    def _read_again(self, count: int) -> None:
        if count:
            dataset = getattr(self.loader, "dataset", None)
            is_saved = self._num_workers > 0 and is_stateful(dataset)
            log.warning(
                "%s cannot begin in the middle of an epoch: reading %d batches again%s.",
                type(self.loader).__name__,
                count,
                " (torchdata's StatefulDataLoader would not: its workers save where they are)" if is_saved else "",
            )
        for number in range(count):
            if self._ahead is _NOTHING and not self._fetch():
                raise DataError(
                    f"{type(self.loader).__name__} ended after {number} batches; before the stop it had given {count}.",
                    fix="resume with the data that the run had, or from a checkpoint made at the end of an epoch.",
                )
            self._ahead = _NOTHING

    def _fetch(self) -> bool:
        """Read one batch ahead; return whether there was one."""
        if self._has_ended:
            return False
        if self._stream is None:
            self._ahead = next(self._iterator, _NOTHING)
        else:
            has_moved = moved_numpy() if self._watches_numpy else None
            with self._stream:
                self._ahead = next(self._iterator, _NOTHING)
            if has_moved is not None and has_moved():
                log.warning(
                    "%s began to draw from NumPy's global generator in the middle of an epoch (batch %d): a resume "
                    "within this epoch will not give the same batches. Draw from a generator in an attribute instead.",
                    type(self.loader).__name__,
                    self.position,
                )
                self._make_stream(with_numpy=True)
        self._has_ended = self._ahead is _NOTHING
        return not self._has_ended

    @override
    def has_next(self) -> bool:
        if self.length is not None and self.position >= self.length:
            return False
        return self._is_open and (self._ahead is not _NOTHING or self._fetch())

    @override
    def take(self) -> Batch:
        if self._ahead is _NOTHING and not self._fetch():
            raise StopIteration
        batch, self._ahead = self._ahead, _NOTHING
        self.position += 1
        if self._first_batches is not None:
            self._compare_workers(self._first_batches, batch)
        return batch

    def _compare_workers(self, seen: list[Any], batch: Batch) -> None:
        """Warn if the first batches of all workers are the same: each reads all of the data."""
        from ..distributed.fingerprint import (  # not imported without workers
            SAME_IN_WORKERS,
            fingerprint_batch,
            is_same_on_all,
        )

        seen.append(fingerprint_batch(batch))
        if len(seen) == self._num_workers or len(set(seen)) > 1:
            self._first_batches = None
            if is_same_on_all(seen):
                data = type(getattr(self.loader, "dataset", None)).__name__
                log.warning(SAME_IN_WORKERS, self._num_workers, type(self.loader).__name__, data, self._num_workers)

    @override
    def close(self) -> None:
        self._iterator = iter(())
        self._ahead = _NOTHING
        self._is_open = self.ends_at_length = False

    @override
    def state_dict(self, back: int = 0) -> StateDict:
        if self._loaded is not None:  # not yet entered, or entered at its end
            return self._loaded
        is_at_end = not back and self._has_ended and self._ahead is _NOTHING
        position = self.position - back
        return {
            "kind": self.kind,
            "is_open": self._is_open,
            "is_at_end": is_at_end or (self.length is not None and position >= self.length),
            "is_dealt": self._is_sequence,
            "epoch": self._epoch,
            "position": position + self.shift,
            "rounds": position,
            "num_workers": self._num_workers,
            "opening": self._opening,
            "current": self._capture_current(),
        }

    def _capture_current(self) -> StateDict:
        return {} if self._is_sequence else capture_generators(self._find_generators())

    def _load(self, state: StateDict) -> None:
        self.close()
        self._loaded = state

    def _find_generators(self) -> StateDict:
        return find_generators(loader=self.loader)


def _num_workers(loader: Loaders) -> int:
    """Return in how many worker processes the loader draws; 0 when it may draw in this process."""
    if not isinstance(loader, DataLoader) or type(loader).__iter__ is not DataLoader.__iter__:
        return 0
    return loader.num_workers


def without_persistent_workers(loader: L) -> L:
    """Return the loader, or a copy whose workers start again in each epoch.

    A persistent worker continues with random numbers that depend on all its work before, which a resume could not
    restore.
    """
    if not isinstance(loader, DataLoader) or not _num_workers(loader) or not loader.persistent_workers:
        return loader
    changed = copy.copy(loader)
    for name, value in {"persistent_workers": False, "_iterator": None}.items():
        object.__setattr__(changed, name, value)  # DataLoader refuses plain assignment
    return changed


def is_one_shot(loader: object) -> bool:
    """Return whether this is an iterator that nothing can rewind: a generator, or one of the built-in iterators.

    A class of the user's may return itself from `__iter__` and start again there, so it does not count.
    """
    if isinstance(loader, GeneratorType):
        return True
    return isinstance(loader, Iterator) and type(loader).__module__ in {"builtins", "itertools"}
