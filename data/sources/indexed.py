"""`IndexedSource`: a DataLoader with a map-style data set."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeGuard, cast

from torch.utils.data import BatchSampler, DataLoader, MapDataPipe
from typing_extensions import override

from ...errors import DataError
from ...protocols import AnySampler, Batch, Indices, Loaders, StateDict, Tree
from ..gather import gathering_parts, pinned_parts
from ..limit import find_length
from ..rng import capture_generators, capture_rng, derive_key, find_generators, restore_generators, restore_rng
from ..tree import change_loader
from ..worker import SeedingDataset, with_indices
from .base import Source, position_of
from .in_order import in_order
from .index_stream import IndexStream, count_indices


def is_indexed(loader: Loaders) -> TypeGuard[DataLoader[Batch]]:
    """Return whether this is a DataLoader that yields one batch for each batch of indices of its sampler."""
    return (
        isinstance(loader, DataLoader)
        and loader._dataset_kind == 0  # map-style
        and not isinstance(loader.dataset, MapDataPipe)
        # A subclass that iterates in its own way may merge, drop or repeat batches.
        and type(loader).__iter__ is DataLoader.__iter__
        and (
            type(loader)._get_iterator is DataLoader._get_iterator
            or getattr(type(loader)._get_iterator, "follows_indices", False)  # a ThreadDataLoader
        )
    )


class IndexedSource(Source):
    """A DataLoader whose indices are re-read on resume, not its data.

    It works on a shallow copy of the user's loader, in which the batch sampler is replaced by an `IndexStream` around
    it: nothing is constructed again, a subclass stays what it is, and the user's loader is left alone.

    In the main process the data set draws from the global generators, exactly as in a hand-written loop. In worker
    processes each batch has random numbers of its own (`SeedingDataset`).
    """

    kind = "indexed"
    loader: DataLoader[Batch]

    def __init__(self, loader: DataLoader[Batch]) -> None:
        super().__init__(loader)
        self._has_workers = loader.num_workers > 0
        name = "sampler" if loader.batch_sampler is None else "batch_sampler"
        most_in_flight = (loader.prefetch_factor or 0) * loader.num_workers + getattr(loader, "prefetch_batches", 0) + 1
        self._index = self._make_index(getattr(loader, name), most_in_flight)
        self._copy = with_indices(in_order(loader), self._index, seeds_workers=self._has_workers)
        change_loader(self._copy, **gathering_parts(loader))
        self._fetch: Callable[[], Batch] = iter(()).__next__
        self._is_at_end = False
        self._reuses_workers = False
        self._opening: StateDict = {}

    def _make_index(self, sampler: AnySampler, most_in_flight: int) -> IndexStream:
        return IndexStream(sampler, most_in_flight)

    @override
    def pin_batches(self) -> None:
        change_loader(self._copy, **(pinned_parts(self.loader) or gathering_parts(self.loader, pins=True)))

    @override
    def announce_epoch(self, epoch: int) -> None:
        self._reuses_workers = self._copy._iterator is not None
        if not (self._has_workers and self.loader.persistent_workers):
            super().announce_epoch(epoch)
            return
        copied = cast(SeedingDataset, self._copy.dataset)
        if copied.has_changed():
            self.shut_down()
        super().announce_epoch(epoch)  # which workers learn, too
        copied.has_changed()

    @override
    def begin(self, epoch: int) -> None:
        had_workers = self._reuses_workers or self._copy._iterator is not None
        if self._loaded is not None:
            self._restore_parts(self._loaded["current"])
            # In an uninterrupted run, the workers of an earlier epoch would have continued too.
            had_workers = had_workers or (self.loader.persistent_workers and bool(self._loaded["opening"]))
            self._loaded = None
        self._opening = {"rng": capture_rng(), **self._capture_parts()}
        self._reuses_workers = had_workers
        self._go_on_from(0, 0)
        self._start(epoch)

    @override
    def resume(self, epoch: int) -> None:
        state = self._loaded
        assert state is not None
        given = position_of(state)
        samples, was, now = state.get("samples"), state["batch_size"], self._batch_size()
        is_regrouped = now != was
        if state["is_at_end"] or (is_regrouped and samples is not None and samples == self._num_samples()):
            # Nothing to give; `begin` of the next epoch needs the state.
            self.position, self._is_open, self._is_at_end = given, True, True
            self._stay_at_end()
            self._opening = state["opening"]
            return
        self._check("dataset_length", state, find_length(self.loader.dataset), "samples in the data set")
        consumed = state["position"]
        if is_regrouped:
            if samples is None or not self._is_regular() or not now or samples % now:
                self._check("batch_size", state, now, "samples in a batch")
            else:
                consumed = samples // now
        self._loaded = None
        self._opening = state["opening"]
        self._reuses_workers = state["reuses_workers"]
        object.__setattr__(self._copy, "_iterator", None)  # workers of another epoch
        self._go_to_opening()
        self._go_on_from(consumed, given)
        self._start(epoch, state, consumed=consumed, regroup=was if is_regrouped else None)
        self.position = given
        if not self._has_workers and not state["num_workers"]:
            # Batches are not read again, so the generators of the data set must be restored.
            if is_regrouped:  # how far ahead the sampler's were is unknown
                restore_generators(self._find_data_generators(), state["current"]["generators"])
            else:
                self._index.pull_up_to(state["pulled"], is_exhausted=state.get("is_exhausted", False))
                restore_generators(self._find_generators(), state["current"]["generators"])
        self._load_stateful({"dataset": state["current"]["stateful"].get("dataset")})

    def _go_to_opening(self) -> None:
        restore_rng(self._opening["rng"])
        self._restore_parts(self._opening)

    def _go_on_from(self, consumed: int, given: int) -> None:
        """Note that the pass that starts now follows `consumed` batches of the loader, `given` as a process counts."""
        self.first, self.shift = given, consumed - given

    def _find_length(self) -> int | None:
        length = find_length(self.loader)
        return None if length is None else length - self.shift

    def _start(
        self, epoch: int, state: StateDict | None = None, *, consumed: int = 0, regroup: int | None = None
    ) -> None:
        self._epoch = epoch
        self.position, self._is_open, self._is_at_end = 0, True, False
        key = derive_key(self._opening["rng"], epoch, *map(_state_text, self._opening["generators"].values()))
        self._index.prepare(epoch, key, is_numbered=self._has_workers)
        # A loader draws a seed when it starts its workers. Workers that had been started in an earlier epoch of a run
        # that continues here have to be started now, but their seed must not shift what the sampler draws.
        rewind = self._go_to_opening if self._reuses_workers and self._copy._iterator is None else None
        if state is not None:
            self._index.skip(consumed, state["fingerprint"], rewind, regroup=regroup)
        elif rewind is not None:
            self._index.skip(0, {}, rewind)
        self._fetch = iter(()).__next__  # ends the workers of an epoch that was cut short
        self._fetch = iter(self._copy).__next__
        if state is None:
            self._index.look_ahead(0)  # draws what the sampler draws, right after the loader's own draw
        else:
            self._index.look_ahead(0, 0)  # no further than before the stop
        self._index.check()
        self.length = self._find_length()
        self.ends_at_length = self.length is not None and self._index.draws_only_at_start

    @override
    def has_next(self) -> bool:
        if self._is_at_end or not self._is_open:
            return False
        # Also at the end: a sampler with its own generator may draw from it when it is exhausted.
        has_index = self._index.look_ahead(self.position + self.shift) == 1
        return has_index and (self.length is None or self.position < self.length)

    @override
    def take(self) -> Batch:
        batch = self._fetch()
        self.position += 1
        return batch

    @override
    def count_latest(self, back: int = 0) -> int | None:
        index = self.latest_indices(back)
        # Without automatic batching, an index is a batch of unknown size unless it is a list.
        return count_indices(index) if self.loader.batch_sampler is not None or type(index) is list else None

    @override
    def latest_indices(self, back: int = 0) -> Indices:
        return self._index.find(self.position + self.shift - back)

    @override
    def at_most(self, upto: int) -> int:
        return self.count_ahead(upto) or 0

    @override
    def count_ahead(self, upto: int) -> int | None:
        if self._is_at_end or not self._is_open:
            return 0
        count = self._index.look_ahead(self.position + self.shift, upto)
        return count if self.length is None else max(0, min(count, self.length - self.position))

    @override
    def close(self) -> None:
        self._fetch = iter(()).__next__  # ends workers that do not persist
        self._is_open = self.ends_at_length = False

    @override
    def shut_down(self) -> None:
        self.close()
        object.__setattr__(self._copy, "_iterator", None)

    @override
    def state_dict(self, back: int = 0) -> StateDict:
        if self._loaded is not None:  # not yet entered, or entered at its end
            return self._loaded
        given = self.position - back
        place = given + self.shift
        consumed = self._count_consumed(place)
        return {
            "kind": self.kind,
            "is_open": self._is_open,
            "is_at_end": self._index.has_ended(place),
            "epoch": self._epoch,
            "position": consumed,
            "rounds": given,
            "samples": self._count_samples(consumed),
            "pulled": self._index.pulled,
            "is_exhausted": self._index.is_exhausted,
            "fingerprint": self._index.fingerprint(place),
            "dataset_length": find_length(self.loader.dataset),
            "batch_size": self._batch_size(),
            "num_workers": self.loader.num_workers,
            "reuses_workers": self._reuses_workers,
            "opening": self._opening,
            "current": self._capture_parts(),
        }

    def _count_consumed(self, place: int) -> int:
        """Return how many of the loader's batches had been given, to all processes together, at this place."""
        return place

    def _is_regular(self) -> bool:
        """Whether batches are consecutive groups of the sampler's indices, so that these can be regrouped."""
        return type(self._index.sampler) is BatchSampler and type(self._index.sampler.batch_size) is int

    def _num_samples(self) -> int | None:
        return find_length(self._index.sampler.sampler) if self._is_regular() else None

    def _count_samples(self, batches: int) -> int | None:
        """Return how many samples are in the epoch's first batches; None where batches are of any size."""
        if not self._is_regular():
            return None
        length, samples = find_length(self.loader), self._num_samples()
        if samples is not None and length is not None and batches >= length:
            return samples
        return batches * int(self._index.sampler.batch_size)

    def _check(self, name: str, state: StateDict, now: int | None, what: str) -> None:
        if state[name] != now:
            raise DataError(
                f"The epoch was begun with {state[name]} {what}; now there are {now}.",
                fix="resume with the data of that run and its batch size (or, with automatic batching, one that "
                "divides the number of samples it had read), or from a checkpoint made at an epoch's end.",
            )

    def _batch_size(self) -> int | None:
        size = self.loader.batch_size
        if size is None:
            size = getattr(self.loader.batch_sampler, "batch_size", None)
        return size if isinstance(size, int) else None

    def _find_generators(self) -> StateDict:
        loader = self.loader
        return find_generators(
            generator=loader.generator, sampler=self._index.sampler, dataset=loader.dataset, collate=loader.collate_fn
        )

    def _find_data_generators(self) -> StateDict:
        """Return those generators that are drawn from to make samples, not to choose them."""
        # Samplers often hold the data set, so where a generator was found first shows nothing.
        found = find_generators(dataset=self.loader.dataset, collate=self.loader.collate_fn).values()
        known = {id(one) for one in found if one is not self.loader.generator}
        return {name: one for name, one in self._find_generators().items() if id(one) in known}

    def _stateful(self) -> StateDict:
        """Return the user's samplers and data set that can save themselves."""
        sampler = self._index.sampler
        parts = {"sampler": sampler, "inner_sampler": getattr(sampler, "sampler", None), "dataset": self.loader.dataset}
        return {
            name: part
            for name, part in parts.items()
            if callable(getattr(part, "state_dict", None)) and callable(getattr(part, "load_state_dict", None))
        }

    def _capture_parts(self) -> StateDict:
        return {
            "generators": capture_generators(self._find_generators()),
            "stateful": {name: part.state_dict() for name, part in self._stateful().items()},
        }

    def _restore_parts(self, state: StateDict) -> None:
        self._load_stateful(state["stateful"])
        restore_generators(self._find_generators(), state["generators"])

    def _load_stateful(self, states: StateDict) -> None:
        for name, part in self._stateful().items():
            if states.get(name) is not None:
                part.load_state_dict(states[name])


def _state_text(state: Tree) -> str:
    return str(state.tolist()) if hasattr(state, "tolist") else str(state)
