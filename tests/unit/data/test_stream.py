"""The batch stream: the same numbers as a hand-written loop, and the same again after a stop at any batch."""

from __future__ import annotations

import copy
import io
import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch._tensor_str import PRINT_OPTS
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
    get_worker_info,
)

from loopwright.data import BatchStream, CombinedLoader, capture_rng, restore_rng
from loopwright.errors import ConfigError, DataError, ModuleError

SIZE = 11


def seed(value: int = 0) -> None:
    random.seed(value)
    np.random.seed(value)
    torch.manual_seed(value)


class Augmented(Dataset):
    """Each sample is its index and a draw of each of the three global generators."""

    def __init__(self, size: int = SIZE) -> None:
        self.size = size
        self.reads: list[int] = []

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        self.reads.append(index)
        return torch.tensor(
            [float(index), random.random(), np.random.normal(), torch.rand(()).item()], dtype=torch.float64
        )


class OwnGenerators(Augmented):
    """Draws from generators in attributes instead."""

    def __init__(self) -> None:
        super().__init__()
        self.random = random.Random(3)
        self.nested = {"numpy": [np.random.default_rng(3), np.random.RandomState(3)]}
        self.torch = torch.Generator().manual_seed(3)

    def __getitem__(self, index: int) -> Any:
        draws = [
            self.random.random(),
            self.nested["numpy"][0].normal(),
            self.nested["numpy"][1].normal(),
            torch.rand((), generator=self.torch).item(),
        ]
        return torch.tensor([float(index), *draws], dtype=torch.float64)


class WithGetitems(Augmented):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        assert type(indices) is list
        return [self[index] for index in indices]


class DrawsAtStart(Sampler):
    """Shuffles with Python's or NumPy's global generator when it begins, as many hand-written samplers do."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __iter__(self) -> Iterator[int]:
        order = list(range(SIZE))
        if self.kind == "python":
            random.shuffle(order)
        elif self.kind == "numpy":
            order = np.random.permutation(SIZE).tolist()
        else:
            order = torch.randperm(SIZE).tolist()
        return iter(order)

    def __len__(self) -> int:
        return SIZE


class DrawsAllTheTime(Sampler):
    """Draws each index when it is asked for it."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __iter__(self) -> Iterator[int]:
        for _ in range(SIZE):
            if self.kind == "python":
                yield random.randrange(SIZE)
            elif self.kind == "numpy":
                yield int(np.random.randint(SIZE))
            else:
                yield int(torch.randint(SIZE, ()))

    def __len__(self) -> int:
        return SIZE


class OwnOrder(Sampler):
    """Keeps a generator across epochs."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(5)

    def __iter__(self) -> Iterator[int]:
        return iter(self.rng.permutation(SIZE).tolist())

    def __len__(self) -> int:
        return SIZE


class SavesItself(Sampler):
    """Order from a counter that only its own state knows."""

    def __init__(self) -> None:
        self.count = 0

    def __iter__(self) -> Iterator[int]:
        self.count += 1
        return iter(torch.randperm(SIZE, generator=torch.Generator().manual_seed(self.count)).tolist())

    def __len__(self) -> int:
        return SIZE

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


class ByEpoch(Sampler):
    def __init__(self) -> None:
        self.epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(SIZE, generator=torch.Generator().manual_seed(self.epoch)).tolist())

    def __len__(self) -> int:
        return SIZE


class UnsizedBatches:
    """A batch sampler without a length, with batches of unequal size."""

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(SIZE).tolist()
        while order:
            size = random.randint(1, 3)
            yield order[:size]
            order = order[size:]


class ReusesList:
    """A batch sampler that fills one list again and again."""

    def __iter__(self) -> Iterator[list[int]]:
        batch: list[int] = []
        for index in torch.randperm(SIZE).tolist():
            batch.append(index)
            if len(batch) == 2:
                yield batch
                batch.clear()


class Buffered(IterableDataset):
    """Shuffles through a small buffer and augments; workers share the samples."""

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        numbers = range(SIZE) if info is None else range(info.id, SIZE, info.num_workers)
        buffer: list[int] = []
        for number in numbers:
            buffer.append(number)
            if len(buffer) == 4:
                yield self.sample(buffer.pop(random.randrange(4)))
        while buffer:
            yield self.sample(buffer.pop(random.randrange(len(buffer))))

    def sample(self, number: int) -> Any:
        return torch.tensor([float(number), np.random.normal(), torch.rand(()).item()], dtype=torch.float64)


class Plain:
    """Any class with `__iter__`."""

    def __iter__(self) -> Iterator[Any]:
        for number in range(5):
            yield {"x": torch.tensor([number, random.random(), np.random.normal()]), "name": f"batch {number}"}


class SaysItsState:
    """A loader that saves itself."""

    def __init__(self, *, sized: bool) -> None:
        self.start = 0
        self.given = 0
        if sized:
            self.__class__ = type("Sized", (SaysItsState,), {"__len__": lambda self: 5})

    def __iter__(self) -> Iterator[Any]:
        self.given, self.start = self.start, 0
        return self.read()

    def read(self) -> Iterator[Any]:
        for number in range(self.given, 5):
            self.given = number + 1
            yield torch.tensor([float(number), random.random()])
        self.given = 0

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start = state["given"]


class Lazy(DataLoader):
    """A subclass with another constructor, which nobody could call by guessing."""

    def __init__(self, size: int, *, secret: str) -> None:
        super().__init__(Augmented(size), batch_size=4, shuffle=True)
        self.secret = secret


def loader(**options: Any) -> DataLoader:
    return DataLoader(options.pop("dataset", None) or Augmented(), **options)


LOADERS: dict[str, Callable[[], Any]] = {
    "in order": lambda: loader(batch_size=3),
    "shuffle": lambda: loader(batch_size=3, shuffle=True),
    "drop_last": lambda: loader(batch_size=3, shuffle=True, drop_last=True),
    "weighted": lambda: loader(batch_size=3, sampler=WeightedRandomSampler([1.0 + i for i in range(SIZE)], SIZE)),
    "replacement": lambda: loader(batch_size=3, sampler=RandomSampler(Augmented(), replacement=True, num_samples=40)),
    "generator": lambda: loader(batch_size=3, shuffle=True, generator=torch.Generator().manual_seed(7)),
    "python at start": lambda: loader(batch_size=3, sampler=DrawsAtStart("python")),
    "numpy at start": lambda: loader(batch_size=3, sampler=DrawsAtStart("numpy")),
    "torch at start": lambda: loader(batch_size=3, sampler=DrawsAtStart("torch")),
    "generator, no remainder": lambda: loader(
        dataset=Augmented(12), batch_size=3, shuffle=True, generator=torch.Generator().manual_seed(7)
    ),
    "own generator": lambda: loader(batch_size=3, sampler=OwnOrder()),
    "saves itself": lambda: loader(batch_size=3, sampler=SavesItself()),
    "set_epoch": lambda: loader(batch_size=3, sampler=ByEpoch()),
    "batch sampler": lambda: loader(batch_sampler=BatchSampler(RandomSampler(Augmented()), 4, True)),
    "list of batches of indices": lambda: loader(batch_sampler=[[1, 2], [0], [5, 4, 3]]),
    "no batching": lambda: loader(batch_size=None, shuffle=True),
    "no batching, sampler": lambda: loader(batch_size=None, sampler=DrawsAtStart("torch")),
    "getitems": lambda: loader(dataset=WithGetitems(), batch_size=3, shuffle=True),
    "data set's generators": lambda: loader(dataset=OwnGenerators(), batch_size=3, shuffle=True),
    "subclass": lambda: Lazy(SIZE, secret="x"),
    "list of tensors": lambda: [torch.full((2,), float(number)) for number in range(5)],
    "list of pairs": lambda: [(torch.full((2,), float(number)), torch.zeros(2)) for number in range(5)],
}
# Sources of batches that draw during an epoch in ways a second reading has to be shielded from.
SHIELDED: dict[str, Callable[[], Any]] = {
    "python all the time": lambda: loader(batch_size=3, sampler=DrawsAllTheTime("python")),
    "numpy all the time": lambda: loader(batch_size=3, sampler=DrawsAllTheTime("numpy")),
    "torch all the time": lambda: loader(batch_size=3, sampler=DrawsAllTheTime("torch")),
    "unsized batch sampler": lambda: loader(batch_sampler=UnsizedBatches()),
    "one list for all batches": lambda: loader(batch_sampler=ReusesList()),
    "iterable data set": lambda: DataLoader(Buffered(), batch_size=2),
    "plain iterable": Plain,
    "stateful, sized": lambda: SaysItsState(sized=True),
    "stateful, unsized": lambda: SaysItsState(sized=False),
    "collection": lambda: {
        "a": loader(batch_size=3, shuffle=True),
        "b": [loader(batch_size=2, shuffle=True, drop_last=True), [torch.zeros(1), torch.ones(1)]],
    },
    "collection with unsized": lambda: [loader(batch_size=4, shuffle=True), Plain()],
    "min_size": lambda: CombinedLoader([loader(batch_size=3, shuffle=True), loader(batch_size=2)], "min_size"),
    "max_size": lambda: CombinedLoader([loader(batch_size=3, shuffle=True), loader(batch_size=2)], "max_size"),
    "sequential": lambda: CombinedLoader([loader(batch_size=6, shuffle=True), Plain()], "sequential"),
}
WORKERS: dict[str, Callable[[], Any]] = {
    "two workers": lambda: loader(batch_size=3, shuffle=True, num_workers=2),
    "persistent workers": lambda: loader(batch_size=3, shuffle=True, num_workers=1, persistent_workers=True),
    "workers, no batching": lambda: loader(batch_size=None, sampler=DrawsAllTheTime("torch"), num_workers=1),
    "workers, data set's generators": lambda: loader(dataset=OwnGenerators(), batch_size=4, num_workers=2),
    "persistent workers, iterable data set": lambda: DataLoader(
        Buffered(), batch_size=2, num_workers=1, persistent_workers=True
    ),
    "workers, iterable data set": lambda: DataLoader(Buffered(), batch_size=2, num_workers=2),
}


def text(batch: Any) -> str:
    options = copy.copy(PRINT_OPTS)
    torch.set_printoptions(precision=17)
    try:
        return repr(batch)
    finally:
        torch.set_printoptions(**vars(options))


def train_on() -> float:
    """Stand for dropout and whatever else a training step draws."""
    return torch.rand(2).sum().item() + random.random() + np.random.normal()


def by_hand(make: Callable[[], Any], epochs: int) -> list[tuple[str, float]]:
    seed()
    data = make()
    rows = []
    for epoch in range(epochs):
        for part in (data, getattr(data, "sampler", None)):
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)
        for batch in data:
            rows.append((text(batch), train_on()))
    return rows


class Stop(Exception):
    """The run is killed; carries the checkpoint."""


class Training:
    """A loop like the fit loop's, which is killed at its n-th point between two batches."""

    def __init__(self, make: Callable[[], Any], stop_at: int | None = None, limit: int | None = None) -> None:
        self.stream = BatchStream(make(), limit)
        self.rows: list[tuple[str, float]] = []
        self.points = 0
        self.stop_at = stop_at

    def point(self, epoch: int, *, is_open: bool) -> None:
        if self.points == self.stop_at:
            state = {"epoch": epoch, "is_open": is_open, "data": self.stream.state_dict(), "rng": capture_rng()}
            self.stream.shut_down()
            raise Stop(through_disk(state))
        self.points += 1

    def run(self, epochs: range, *, reopened: bool = False) -> list[tuple[str, float]]:
        for epoch in epochs:
            if not reopened:
                self.stream.open(epoch)
            reopened = False
            self.point(epoch, is_open=True)
            while self.stream.has_next():
                self.point(epoch, is_open=True)
                self.rows.append((text(self.stream.next_batch()), train_on()))
                self.point(epoch, is_open=True)
            self.point(epoch, is_open=True)
            self.point(epoch + 1, is_open=False)
            self.stream.close()
            self.point(epoch + 1, is_open=False)
        self.stream.shut_down()
        return self.rows

    def resume(self, saved: dict[str, Any], epochs: int) -> list[tuple[str, float]]:
        seed(99)
        self.stream.load_state_dict(saved["data"])
        if saved["is_open"]:
            self.stream.reopen()
        restore_rng(saved["rng"])
        return self.run(range(saved["epoch"], epochs), reopened=saved["is_open"])


def through_disk(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("name", LOADERS)
def test_stream_equals_a_hand_written_loop(name: str) -> None:
    seed()
    rows = Training(LOADERS[name]).run(range(3))
    assert rows == by_hand(LOADERS[name], 3)


@pytest.mark.parametrize("name", [*LOADERS, *SHIELDED])
def test_resume_at_every_point_equals_the_uninterrupted_run(name: str) -> None:
    check_resume({**LOADERS, **SHIELDED}[name])


@pytest.mark.parametrize("name", ["shuffle", "generator", "stateful, sized", "stateful, unsized", "plain iterable"])
def test_resume_of_limited_epochs_equals_the_uninterrupted_run(name: str) -> None:
    check_resume({**LOADERS, **SHIELDED}[name], limit=2)


@pytest.mark.parametrize("name", WORKERS)
def test_resume_with_workers_equals_the_uninterrupted_run(name: str) -> None:
    check_resume(WORKERS[name], stops=(4, 15))


def check_resume(make: Callable[[], Any], stops: tuple[int, ...] | None = None, limit: int | None = None) -> None:
    seed()
    whole = Training(make, limit=limit)
    whole.run(range(2))
    assert len(whole.rows) > 3
    assert len(set(whole.rows)) > 3
    # All points of a short run; of a long one, every third.
    for stop in stops or range(0, whole.points, 1 if whole.points < 35 else 3):
        seed()
        before = Training(make, stop, limit)
        with pytest.raises(Stop) as stopped:
            before.run(range(2))
        after = Training(make, limit=limit).resume(stopped.value.args[0], 2)
        assert before.rows + after == whole.rows, f"stopped at point {stop}"


def test_a_run_that_is_resumed_many_times_equals_the_uninterrupted_run() -> None:
    make = LOADERS["generator"]
    seed()
    whole = Training(make).run(range(3))
    seed()
    training = Training(make, 5)
    with pytest.raises(Stop) as stopped:
        training.run(range(3))
    rows, saved = training.rows, stopped.value.args[0]
    while saved is not None:
        training = Training(make, 5)
        try:
            training.resume(saved, 3)
            saved = None
        except Stop as again:
            saved = again.args[0]
        rows = rows + training.rows
    assert rows == whole


def test_resume_within_an_epoch_reads_no_sample_again() -> None:
    stream = BatchStream(loader(batch_size=3, shuffle=True))
    stream.open(0)
    given = [stream.next_batch()[:, 0].tolist() for _ in range(2)]
    again = Augmented()
    resumed = BatchStream(loader(dataset=again, batch_size=3, shuffle=True))
    resumed.load_state_dict(through_disk(stream.state_dict()))
    resumed.reopen()
    rest = []
    while resumed.has_next():
        rest.append(resumed.next_batch()[:, 0].tolist())
    assert again.reads == [index for batch in rest for index in batch]
    assert sorted(index for batch in given + rest for index in batch) == list(range(SIZE))


def test_resume_after_thousands_of_batches() -> None:
    def make() -> Any:
        return loader(dataset=range(6000), batch_size=2, shuffle=True)

    seed()
    stream = BatchStream(make())
    stream.open(0)
    for _ in range(2500):
        stream.next_batch()
    again = BatchStream(make())
    again.load_state_dict(stream.state_dict())
    again.reopen()
    for _ in range(500):
        assert again.has_next()
        assert torch.equal(again.next_batch(), stream.next_batch())
    assert not again.has_next()


def test_saved_position_is_what_was_given_not_what_workers_fetched_ahead() -> None:
    stream = BatchStream(loader(batch_size=1, num_workers=1, prefetch_factor=4))
    stream.open(0)
    stream.next_batch()
    assert stream.position == stream.state_dict()["position"] == 1
    stream.close()


def test_worker_batches_do_not_depend_on_the_number_of_workers() -> None:
    rows = []
    for workers in (1, 2):
        seed()
        rows.append(Training(lambda count=workers: loader(batch_size=3, shuffle=True, num_workers=count)).run(range(1)))
    assert rows[0] == rows[1]


def test_resume_with_another_number_of_workers_equals_the_uninterrupted_run() -> None:
    def make(workers: int) -> Callable[[], Any]:
        return lambda: loader(batch_size=2, shuffle=True, num_workers=workers)

    seed()
    whole = Training(make(2)).run(range(1))
    seed()
    before = Training(make(2), 6)
    with pytest.raises(Stop) as stopped:
        before.run(range(1))
    assert before.rows + Training(make(1)).resume(stopped.value.args[0], 1) == whole


def test_worker_augmentation_differs_between_batches_and_epochs() -> None:
    seed()
    generator = torch.Generator().manual_seed(1)
    stream = BatchStream(loader(batch_size=1, num_workers=1, persistent_workers=True, generator=generator))
    draws: list[float] = []
    for epoch in range(2):
        stream.open(epoch)
        while stream.has_next():
            draws += stream.next_batch()[0, 1:].tolist()
    assert len(set(draws)) == len(draws) == 2 * SIZE * 3
    stream.shut_down()


class Watched(Augmented):
    """Tells what the worker sees."""

    def __init__(self) -> None:
        super().__init__(4)
        self.epoch = -1
        self.mark = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        return torch.tensor([self.epoch, self.mark, 0 if info is None else int(info.dataset is self)])


def mark_data_set(worker_id: int) -> None:
    info = get_worker_info()
    assert info is not None
    assert isinstance(info.dataset, Watched)
    info.dataset.mark = 7


def test_workers_see_the_users_data_set_and_its_epoch() -> None:
    data = loader(dataset=Watched(), batch_size=4, num_workers=1, persistent_workers=True, worker_init_fn=mark_data_set)
    stream = BatchStream(data)
    for epoch in range(2):
        stream.open(epoch)
        assert stream.next_batch()[0].tolist() == [epoch, 7, 1]
        assert not stream.has_next()
    stream.shut_down()


def test_the_users_loader_is_left_alone() -> None:
    data = Lazy(8, secret="x")
    before = dict(vars(data))
    stream = BatchStream(data)
    stream.open(0)
    stream.next_batch()
    assert vars(data) == before


def test_in_order_false_is_read_in_order_and_that_is_said() -> None:
    with pytest.warns(UserWarning, match="in_order=False.* is read in order"):
        BatchStream(loader(num_workers=1, in_order=False))


def test_replay_says_how_much_is_read_again(caplog: pytest.LogCaptureFixture) -> None:
    again = BatchStream(Plain())
    again.load_state_dict(state_of(Plain()))
    again.reopen()
    assert "reading 2 batches again" in caplog.text


def test_an_iterable_that_draws_does_not_disturb_training_after_its_first_batch() -> None:
    seed()
    stream = BatchStream(Plain())
    stream.open(0)
    before = through_disk(capture_rng())
    while stream.has_next():
        stream.next_batch()
    after = capture_rng()
    assert torch.equal(before["torch"], after["torch"])
    assert torch.equal(before["python"]["state"], after["python"]["state"])


class BeginsLate:
    """Draws from NumPy's global generator, but not for its first batch."""

    def __iter__(self) -> Iterator[Any]:
        yield 0
        yield np.random.rand()
        yield np.random.rand()


class DrawsLate:
    """Draws from other generators as the epoch goes on, and once from one that it then leaves alone."""

    def __iter__(self) -> Iterator[Any]:
        for number in range(6):
            drawn = [float(number)]
            if number == 2:
                drawn.append(torch.randn(()).item())
            if number >= 3:
                drawn.append(random.gauss(0, 1))
            yield torch.tensor(drawn)


def test_resume_of_an_iterable_that_draws_late_equals_the_uninterrupted_run() -> None:
    check_resume(DrawsLate)


def test_an_iterable_that_draws_late_does_not_disturb_training() -> None:
    seed()
    expected = [random.random() + torch.rand(()).item() for _ in range(6)]
    seed()
    stream = BatchStream(DrawsLate())
    stream.open(0)
    drawn = []
    while stream.has_next():
        stream.next_batch()
        drawn.append(random.random() + torch.rand(()).item())
    assert drawn == expected


@pytest.mark.parametrize("kinds", [set(), {"python", "torch"}])
def test_only_the_generators_that_an_iterable_draws_from_are_kept_apart(kinds: set[str]) -> None:
    stream = BatchStream(DrawsLate() if kinds else Quiet())
    stream.open(0)
    while stream.has_next():
        stream.next_batch()
    source: Any = stream._source
    assert source._kinds == kinds
    assert (source._stream is None) == (not kinds)


class Quiet:
    """Draws nothing."""

    def __iter__(self) -> Iterator[Any]:
        yield from range(3)


def test_numpy_used_late_is_said_to_be_inexact(caplog: pytest.LogCaptureFixture) -> None:
    seed()
    stream = BatchStream(BeginsLate())
    stream.open(0)
    while stream.has_next():
        stream.next_batch()
    assert caplog.text.count("NumPy's global generator in the middle of an epoch") == 1


@pytest.mark.parametrize("upto", [1, 3, 100])
def test_remaining_is_exact_for_a_batch_sampler_without_a_length(upto: int) -> None:
    seed()
    stream = BatchStream(loader(batch_sampler=UnsizedBatches()))
    stream.open(0)
    assert not stream.is_sized_exactly
    assert stream.num_batches == float("inf")
    claims = []
    while stream.has_next():
        claims.append(stream.remaining(upto))
        stream.next_batch()
    count = len(claims)
    assert claims == [min(upto, count - number) for number in range(count)]
    assert stream.remaining(upto) == 0


def test_remaining_respects_length_and_limit() -> None:
    stream = BatchStream(loader(batch_size=2), limit=4)
    stream.open(0)
    stream.next_batch()
    assert (stream.num_batches, stream.remaining(2), stream.remaining(8)) == (4, 2, 3)


def test_a_limit_ends_the_epoch() -> None:
    stream = BatchStream(loader(batch_size=2), limit=0.5)
    for epoch in range(2):
        stream.open(epoch)
        count = 0
        while stream.has_next():
            stream.next_batch()
            count += 1
        assert count == stream.position == stream.num_batches == 3


class WrongLength(Sampler):
    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        return iter(range(5))

    def __len__(self) -> int:
        return self.length


@pytest.mark.parametrize(("length", "expected"), [(3, 3), (5, 5), (9, 5)])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_length_that_is_wrong_ends_the_epoch_where_length_or_data_end(
    length: int, expected: int, workers: int
) -> None:
    stream = BatchStream(loader(batch_size=1, sampler=WrongLength(length), num_workers=workers))
    stream.open(0)
    count = 0
    while stream.has_next():
        stream.next_batch()
        count += 1
    assert count == expected
    stream.close()


def test_collection_keeps_its_shape_and_shorter_loaders_begin_again() -> None:
    stream = BatchStream({"a": [torch.zeros(1)] * 3, "b": (range(10, 12), [loader(dataset=range(1))])})
    stream.open(0)
    batches = []
    while stream.has_next():
        batches.append(stream.next_batch())
    assert stream.num_batches == len(batches) == 3
    assert [batch["b"][0] for batch in batches] == [10, 11, 10]
    assert isinstance(batches[0]["b"], tuple)
    assert isinstance(batches[0]["b"][1], list)


def test_list_of_batches_is_one_loader() -> None:
    stream = BatchStream([(torch.zeros(2), torch.ones(2)), (torch.ones(2), torch.ones(2))])
    stream.open(0)
    assert isinstance(stream.next_batch(), tuple)
    assert stream.num_batches == 2


# --- errors --------------------------------------------------------------------------------------------------------


def state_of(data: Any, batches: int = 2) -> Any:
    stream = BatchStream(data)
    stream.open(0)
    for _ in range(batches):
        assert stream.has_next()
        stream.next_batch()
    state = stream.state_dict()
    stream.close()
    return state


class Entropy(Sampler):
    """An order that nothing can find again."""

    def __iter__(self) -> Iterator[int]:
        order = list(range(SIZE))
        random.SystemRandom().shuffle(order)
        return iter(order)

    def __len__(self) -> int:
        return SIZE


@pytest.mark.parametrize("workers", [0, 1])
def test_another_order_than_before_is_an_error(workers: int) -> None:
    state = state_of(loader(batch_size=4, sampler=Entropy(), num_workers=workers))
    stream = BatchStream(loader(batch_size=4, sampler=Entropy(), num_workers=workers))
    stream.load_state_dict(state)
    with pytest.raises(DataError, match=r"BatchSampler returned other indices.*first 2 batches"):
        stream.reopen()
    stream.close()


def test_another_length_of_the_data_set_is_an_error() -> None:
    state = state_of(loader(batch_size=2))
    stream = BatchStream(loader(dataset=Augmented(9), batch_size=2))
    stream.load_state_dict(state)
    with pytest.raises(DataError, match="11 samples in the data set; now there are 9"):
        stream.reopen()


def test_another_batch_size_is_an_error() -> None:
    state = state_of(loader(batch_size=2))
    stream = BatchStream(loader(batch_size=3))
    stream.load_state_dict(state)
    with pytest.raises(DataError, match="2 samples in a batch; now there are 3"):
        stream.reopen()


def test_more_data_may_come_between_epochs() -> None:
    again = BatchStream(loader(dataset=Augmented(20), batch_size=4))
    again.load_state_dict(state_of(loader(batch_size=4), 3))
    again.open(1)
    assert again.num_batches == 5


def test_a_loader_of_another_kind_is_an_error() -> None:
    state = state_of(loader(batch_size=2))
    with pytest.raises(DataError, match="map-style data set, but Plain is an iterable"):
        BatchStream(Plain()).load_state_dict(state)


def test_another_collection_is_an_error() -> None:
    state = state_of([loader(), loader()])
    with pytest.raises(DataError, match="positions of 2 loaders"):
        BatchStream([loader()] * 3).load_state_dict(state)


def test_another_number_of_workers_of_an_iterable_data_set_is_an_error() -> None:
    state = state_of(DataLoader(Buffered(), batch_size=2))
    stream = BatchStream(DataLoader(Buffered(), batch_size=2, num_workers=1))
    stream.load_state_dict(state)
    with pytest.raises(DataError, match="0 workers; now there are 1"):
        stream.reopen()


class Short:
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Any]:
        return iter(range(self.count))


def test_fewer_batches_than_before_is_an_error() -> None:
    stream = BatchStream(Short(2))
    stream.load_state_dict(state_of(Plain(), 4))
    with pytest.raises(DataError, match="ended after 2 batches; before the stop it had yielded 4"):
        stream.reopen()


@pytest.mark.parametrize("data", [[], Short(0), {"a": []}])
def test_no_batches_is_an_error(data: Any) -> None:
    with pytest.raises(DataError, match="no batches in epoch 0"):
        BatchStream(data).open(0)


def test_no_batches_with_drop_last_gets_advice() -> None:
    with pytest.raises(DataError, match="fewer than 3 samples"):
        BatchStream(loader(dataset=Augmented(2), batch_size=3, drop_last=True)).open(0)


def test_limit_zero_is_no_error() -> None:
    stream = BatchStream(loader(), limit=0)
    assert stream.num_batches == 0
    assert not stream.has_next()


def test_a_generator_serves_one_epoch_and_says_so() -> None:
    stream = BatchStream(number for number in range(3))
    stream.open(0)
    while stream.has_next():
        stream.next_batch()
    with pytest.raises(DataError, match="generator object, which can be read only once, so epoch 1 has no data"):
        stream.open(1)


def test_resuming_a_generator_is_an_error() -> None:
    state = state_of(iter([1, 2, 3]))
    stream = BatchStream(iter([1, 2, 3]))
    stream.load_state_dict(state)
    with pytest.raises(DataError, match="read only once"):
        stream.reopen()


def test_a_fraction_of_an_unknown_length_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"limit_train_batches=0.5.*no __len__"):
        BatchStream(Plain(), limit=0.5)


@pytest.mark.parametrize("data", [3, "text", None])
def test_what_cannot_be_iterated_is_an_error(data: Any) -> None:
    with pytest.raises(ModuleError, match="cannot be iterated"):
        BatchStream(data)


def test_reopen_without_a_state_is_an_error() -> None:
    with pytest.raises(DataError, match="no position"):
        BatchStream(loader()).reopen()


class EndsEarly(SaysItsState):
    def __init__(self) -> None:
        super().__init__(sized=False)

    def __len__(self) -> int:
        return 9


def test_a_stateful_loader_that_ends_early_is_named() -> None:
    stream = BatchStream(EndsEarly())
    stream.open(0)
    for _ in range(5):
        stream.next_batch()
    with pytest.raises(DataError, match="9 batches, but it ended after 5"):
        stream.next_batch()


# --- going back ------------------------------------------------------------------------------------------------------


def take(stream: BatchStream, count: int) -> list[Any]:
    return [stream.next_batch() for _ in range(count) if stream.has_next()]


@pytest.mark.parametrize("back", [0, 1, 3, 700])
def test_a_state_of_earlier_batches_gives_them_again(back: int) -> None:
    def make() -> BatchStream:
        return BatchStream(DataLoader(range(2000), shuffle=True, batch_size=2))

    seed()
    stream = make()
    stream.open(0)
    given = take(stream, 800)
    state = through_disk(stream.state_dict(800 - back))
    resumed = make()
    resumed.load_state_dict(state)
    resumed.reopen()
    assert resumed.position == 800 - back
    again = take(resumed, back)
    assert all(torch.equal(a, b) for a, b in zip(again, given[800 - back :], strict=True))
    assert stream.position == 800


def test_a_collection_goes_back_unless_a_loader_was_begun_anew() -> None:
    def make() -> BatchStream:
        return BatchStream({"short": DataLoader(range(3)), "long": DataLoader(range(8))})

    stream = make()
    stream.open(0)
    given = take(stream, 6)
    for position, expected in ((4, 4), (3, 3), (2, 6)):  # before 3, the short one was in another pass
        resumed = make()
        resumed.load_state_dict(through_disk(stream.state_dict(position)))
        resumed.reopen()
        assert resumed.position == expected
        assert take(resumed, 6 - expected) == given[expected:]


def test_an_epoch_of_an_iterable_that_gives_nothing_is_empty() -> None:
    class Sometimes:
        passes = 0

        def __iter__(self) -> Iterator[int]:
            self.passes += 1
            return iter(range(2) if self.passes % 2 else ())

    stream = BatchStream(Sometimes())
    given = []
    for epoch in range(3):
        with pytest.warns(UserWarning, match="no batches in epoch 1") if epoch == 1 else nullcontext():
            stream.open(epoch, may_be_empty=True)
        given.append(take(stream, 5))
    assert given == [[0, 1], [], [0, 1]]
