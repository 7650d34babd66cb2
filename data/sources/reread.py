"""`RereadSource`: any other iterable. It can only be read from its start, so a resume re-reads the epoch's batches."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Collection, Iterator
from types import GeneratorType
from typing import TYPE_CHECKING, TypeVar

from torch.utils.data import DataLoader
from typing_extensions import override

from ...errors import DataError
from ...messages import counted
from ...protocols import Batch, Loader, Loaders, StateDict
from ..limit import find_length
from ..rng import (
    KINDS,
    RngStream,
    capture_generators,
    capture_rng,
    derive_key,
    find_generators,
    kinds_that_moved,
    restore_generators,
    restore_kinds,
    restore_rng,
)
from ..tree import changed_loader
from .base import Source, position_of
from .stateful import is_stateful

if TYPE_CHECKING:
    from ..rng_watch import RngWatch

log = logging.getLogger(__name__)
_NOTHING: Batch = object()

L = TypeVar("L")


class RereadSource(Source):
    """An iterable without indices and without its own state: generators, iterable data sets, lists of batches.

    Iteration begins and the first batch is fetched with the global generators, as in a hand-written loop; the
    generators that this moved are a stream of the iterable's own after that. So the same batches come when it is
    iterated again from the same start, whatever training draws in between, and a batch may be fetched before it is
    asked for (which shows the end of an epoch of unknown length). The other generators are watched, which is quicker
    than keeping them apart. One that a later batch draws from first is reset after that batch, which the state notes
    for the second reading, and joins the stream. Lists and tuples of batches, and loaders that draw in worker
    processes, need none of this. Fingerprints of some batches show whether the second reading yields the same.
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
        self._ahead: Batch = _NOTHING
        self._stream: RngStream | None = None
        self._watch: RngWatch | None = None
        self._kinds: frozenset[str] = frozenset()
        self._fetched = 0  # batches of this epoch, read ahead or given
        self._late: dict[int, StateDict] = {}  # batch that drew first from a generator -> where that one was
        self._marks: dict[int, int] = {}  # fingerprints of this epoch's batches 1, 2, 4, 8, ...
        self._marks_before: dict[int, int] = {}  # the same before the stop, while it is read again
        self._next_mark = 0
        self._first_batches: list[int | None] | None = (
            [] if self._num_workers > 1 else None
        )  # of the first epoch, to compare
        self._has_ended = False
        self._was_read = False
        self._opening: StateDict = {}
        dataset = getattr(loader, "dataset", None)
        if hasattr(dataset, "load_state_dict") and not is_stateful(dataset) and not hasattr(dataset, "set_epoch"):
            log.warning(
                "%s keeps its position and its count of epochs only with a loader that has state_dict, such as the "
                "StreamingDataLoader of its package: after a resume, %s begins with its first epoch again.",
                type(dataset).__name__,
                type(loader).__name__,
            )

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
                f"The epoch was begun with {state['num_workers']} workers; now there are "
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
            self._start(epoch, dict(state.get("late", {})), dict(state.get("marks", {})))
            self._read_again(state["position"])
            self._marks_before = {}
            self.position = state["position"]

    def _start(self, epoch: int, late: dict[int, StateDict] | None = None, marks: dict[int, int] | None = None) -> None:
        if self._was_read and is_one_shot(self.loader):
            raise self._is_spent(f"so epoch {epoch} has no data")
        self._was_read = True
        self.length = find_length(self.loader)
        self._epoch = epoch
        self.position, self._is_open, self._has_ended = 0, True, False
        self.first = self.shift = 0
        self._stream = self._watch = None
        self._fetched, self._late = 0, {} if late is None else late
        self._marks, self._marks_before = {}, {} if marks is None else marks
        self._next_mark = 0 if self._is_sequence else 1
        self._ahead = _NOTHING
        self._iterator = iter(())  # ends the workers of an epoch that was cut short
        try:
            self._read_first()
        except BaseException:
            self._is_open = False  # the epoch did not begin
            raise

    def _read_first(self) -> None:
        if self._is_sequence or self._num_workers:
            self._iterator = iter(self._iterable)
            self.ends_at_length = self._is_sequence
            return
        from ..rng_watch import RngWatch  # a program that only makes a Trainer reads no data

        self._iterator = iter(self._iterable)
        watch = RngWatch(("python", "torch"))
        watch.begin()
        self._ahead = next(self._iterator, _NOTHING)
        self._has_ended = self._ahead is _NOTHING
        # NumPy keeps the second of two normal numbers elsewhere than where it is watched.
        of_numpy = kinds_that_moved(self._opening["rng"], capture_rng()) & {"numpy"}
        self._keep_apart([*watch.moved(), *of_numpy])
        self._fetched = 1
        self._mark()

    def _keep_apart(self, kinds: Collection[str]) -> None:
        """Let the iterable draw from its own stream for these generators, and watch the others."""
        from ..rng_watch import RngWatch

        self._watch = RngWatch(kind for kind in KINDS if kind not in kinds)
        self._kinds = frozenset(kinds)
        if kinds:
            self._stream = RngStream(derive_key(self._opening["rng"], self._epoch, "replay", self._fetched), kinds)

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
                "%s cannot begin in the middle of an epoch: reading %s again%s.",
                type(self.loader).__name__,
                counted(count, "batch"),
                " (torchdata's StatefulDataLoader would not: its workers save where they are)" if is_saved else "",
            )
        for number in range(count):
            if self._ahead is _NOTHING and not self._fetch():
                raise DataError(
                    f"{type(self.loader).__name__} ended after {counted(number, 'batch')}; before the stop it had "
                    f"yielded {count}.",
                    fix="resume with the data that the run had, or from a checkpoint made at the end of an epoch.",
                )
            self._ahead = _NOTHING

    def _fetch(self) -> bool:
        """Read one batch ahead; return whether there was one."""
        if self._has_ended:
            return False
        watch = self._watch
        if watch is None:  # it does not draw in this process
            self._ahead = next(self._iterator, _NOTHING)
        else:
            watch.begin()
            before = self._late.get(self._fetched)
            if before is not None:
                restore_kinds(before)
            if self._stream is None:
                self._ahead = next(self._iterator, _NOTHING)
            else:
                with self._stream:
                    self._ahead = next(self._iterator, _NOTHING)
            moved = watch.moved()
            if moved or before is not None:
                self._note_late(watch, moved)
        self._fetched += 1
        self._has_ended = self._ahead is _NOTHING
        if self._fetched == self._next_mark:
            self._mark()
        return not self._has_ended

    def _mark(self) -> None:
        """Note which batch was read, and compare it with the one before the stop. Called for batches 1, 2, 4, 8, ..."""
        if self._has_ended:
            return
        from ..sharded_iterable import digest  # a program that only makes a Trainer reads no data

        number, self._next_mark = self._fetched, 2 * self._fetched
        mark = self._marks[number] = digest([self._ahead])
        if self._marks_before.get(number, mark) != mark:
            self._marks_before = {}  # one warning is enough
            log.warning(
                "%s yields other batches than before the stop (batch %d of the epoch differs), so that some samples of "
                "this epoch are trained on twice, and others never. Let its order depend on a fixed seed and "
                "set_epoch, or on Python's or torch's global generators.",
                type(self.loader).__name__,
                number,
            )

    def _note_late(self, watch: RngWatch, moved: Collection[str]) -> None:
        """Restore the generators that this batch is the first to draw from, and keep them apart from now on."""
        before = self._late.get(self._fetched, {})
        if "numpy" in moved:  # whose state would take longer to note than all else
            log.warning(
                "%s began to draw from NumPy's global generator in the middle of an epoch (batch %d): a resume "
                "within this epoch will not give the same batches. Draw from a generator in an attribute instead.",
                type(self.loader).__name__,
                self.position,
            )
        states = {kind: watch.put_back(kind) for kind in {*moved, *before} - {"numpy"}}
        if states:
            self._late[self._fetched] = before or states
        self._keep_apart([kind for kind in KINDS if kind in {*self._kinds, *moved, *before}])

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

    def _compare_workers(self, seen: list[int | None], batch: Batch) -> None:
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
            "late": dict(self._late),
            "marks": dict(self._marks),
        }

    def _capture_current(self) -> StateDict:
        return {} if self._is_sequence else capture_generators(self._find_generators())

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
    return changed_loader(loader, persistent_workers=False)


def is_one_shot(loader: Loaders) -> bool:
    """Return whether this is an iterator that nothing can rewind: a generator, or one of the built-in iterators.

    A class of the user's may return itself from `__iter__` and start again there, so it does not count.
    """
    if isinstance(loader, GeneratorType):
        return True
    return isinstance(loader, Iterator) and type(loader).__module__ in {"builtins", "itertools"}
