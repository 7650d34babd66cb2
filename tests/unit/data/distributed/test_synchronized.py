"""Each process reads its own loader, and all end an epoch at the same step, whatever their lengths."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sharing import Numbers, plain, through_disk
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.data import DataLoader, IterableDataset, Sampler

from loopwright.data import NO_BATCH, BatchStream, Shard, merge_states
from loopwright.data.distributed.fingerprint import fingerprint_batch, is_same_on_all, strided_parts
from loopwright.errors import DataError

WAIT_S = 20


class Own:
    """Batches of one rank, without a length."""

    def __init__(self, rank: int, count: int) -> None:
        self.rank = rank
        self.count = count

    def __iter__(self) -> Iterator[Any]:
        for number in range(self.count):
            yield torch.tensor([self.rank, number])


class Sized(Own):
    """Says how many batches it has."""

    def __len__(self) -> int:
        return self.count


class Boasts(Own):
    """Says that it has more than it has."""

    def __len__(self) -> int:
        return self.count + 3


class OwnSamples(IterableDataset):
    def __init__(self, rank: int, count: int) -> None:
        self.rank = rank
        self.count = count

    def __iter__(self) -> Iterator[Any]:
        return iter(torch.tensor([self.rank, number]) for number in range(self.count))


class SaysItsState(Own):
    def __init__(self, rank: int, count: int) -> None:
        super().__init__(rank, count)
        self.start = self.given = 0

    def __iter__(self) -> Iterator[Any]:
        self.given, self.start = self.start, 0
        return self.read()

    def read(self) -> Iterator[Any]:
        for number in range(self.given, self.count):
            self.given = number + 1
            yield torch.tensor([self.rank, number])
        self.given = 0

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start = state["given"]


class SizedState(SaysItsState):
    def __len__(self) -> int:
        return self.count


class OfRank(Sampler):
    """Knows its rank, and has another length on each."""

    num_replicas = 0

    def __init__(self, rank: int, count: int) -> None:
        self.rank = rank
        self.count = count

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.count))


class SizedOfRank(OfRank):
    def __len__(self) -> int:
        return self.count


LOADERS: dict[str, Callable[[int, int], Any]] = {
    "iterable": Own,
    "sized iterable": Sized,
    "boasting iterable": Boasts,
    "iterable data set": lambda rank, count: DataLoader(OwnSamples(rank, count), batch_size=None),
    "stateful": SaysItsState,
    "sized stateful": SizedState,
    "list of its own": lambda rank, count: [torch.tensor([rank, number]) for number in range(count)],
    "sampler of its rank": lambda rank, count: DataLoader(Numbers(99), sampler=OfRank(rank, count), batch_size=None),
    "sized sampler of its rank": lambda rank, count: DataLoader(
        Numbers(99), sampler=SizedOfRank(rank, count), batch_size=None
    ),
    "collection": lambda rank, count: {"own": Own(rank, count), "dealt": DataLoader(Numbers(60), batch_size=None)},
}


class Processes:
    """Threads in the place of processes: what they agree on has to be asked by all, or the test fails.

    They share the global random number generators, so one runs at a time, until it waits for the others.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size)
        self.turn = threading.Lock()
        self.numbers = [0] * size
        self.calls = 0

    def run(self, function: Callable[[int, Callable[[int], int], Callable[[int], int]], Any]) -> list[Any]:
        """Return what `function(rank, smallest, largest)` returns on each rank."""

        def meet() -> None:
            self.turn.release()
            try:
                self.barrier.wait(WAIT_S)
            finally:
                self.turn.acquire()

        def exchange(rank: int, number: int) -> list[int]:
            self.numbers[rank] = number
            meet()
            numbers = list(self.numbers)
            self.calls += rank == 0
            meet()
            return numbers

        def one(rank: int) -> Any:
            try:
                with self.turn:
                    result = function(rank, lambda n: min(exchange(rank, n)), lambda n: max(exchange(rank, n)))
            except BaseException:
                self.barrier.abort()  # nobody waits for a rank that has failed
                raise
            return result

        with ThreadPoolExecutor(self.size) as pool:
            futures = [pool.submit(one, rank) for rank in range(self.size)]
            errors = [future.exception() for future in futures]
            for error in errors:
                if error is not None and not isinstance(error, threading.BrokenBarrierError):
                    raise error
            return [future.result() for future in futures]


def stream_of(loader: Any, rank: int, size: int, uneven: str, low: Any, high: Any) -> BatchStream:
    shard = Shard(rank, size, uneven, splits=not isinstance(loader, list))
    return BatchStream(loader, shard=shard, agree=low if uneven == "stop_all" else high)


def own(batch: Any) -> Any:
    if batch is NO_BATCH:
        return None
    return plain(batch["own"] if isinstance(batch, dict) else batch)


def read(stream: BatchStream, window: int, most: int | None = None) -> tuple[list[Any], list[Any]]:
    """Return the batches of an epoch, and what the stream said that is equal on all ranks."""
    batches: list[Any] = []
    said: list[Any] = []
    while most is None or len(batches) < most:
        size = stream.remaining(window)
        said.append(size)
        if not size:
            break
        for number in range(size):
            assert stream.has_next()
            batches.append(own(stream.next_batch()))
            said.append((stream.position, stream.has_next()))
            if number + 1 < size:
                assert said[-1][1]
    return batches, said


def expected(rank: int, counts: list[int], uneven: str, name: str) -> list[Any]:
    rounds = min(counts) if uneven == "stop_all" else max(counts)
    count = counts[rank]
    numbers = [number if number < count else (number % count if uneven == "cycle" and count else None)
               for number in range(rounds)]  # fmt: skip
    return [None if n is None else n if "sampler" in name else [rank, n] for n in numbers]


@given(
    name=st.sampled_from(sorted(LOADERS)),
    counts=st.lists(st.integers(0, 7), min_size=2, max_size=3),
    uneven=st.sampled_from(["stop_all", "cycle", "zero_weight"]),
    window=st.integers(1, 4),
)
@settings(max_examples=50, deadline=None)
def test_all_end_at_the_same_step(name: str, counts: list[int], uneven: str, window: int) -> None:
    size = len(counts)
    if name == "collection" and (uneven != "stop_all" or not min(counts)):
        return  # its shorter member begins again

    def rank_main(rank: int, low: Any, high: Any) -> Any:
        stream = stream_of(LOADERS[name](rank, counts[rank]), rank, size, uneven, low, high)
        rows = []
        for epoch in range(2):
            try:
                stream.open(epoch)
            except DataError as error:
                return str(error)
            rows.append(read(stream, window))
            stream.close()
        stream.shut_down()
        return rows

    results = Processes(size).run(rank_main)
    if not (min(counts) if uneven == "stop_all" else max(counts)):
        assert all("no batches in epoch 0" in result for result in results)
        return
    for epoch in range(2):
        assert len({repr(rows[epoch][1]) for rows in results}) == 1
        if name != "collection":
            for rank, rows in enumerate(results):
                assert rows[epoch][0] == expected(rank, counts, uneven, name)


@pytest.mark.parametrize("uneven", ["stop_all", "cycle", "zero_weight"])
@pytest.mark.parametrize("name", ["iterable", "list of its own"])
def test_lengths_of_nothing_five_and_one(name: str, uneven: str, caplog: pytest.LogCaptureFixture) -> None:
    counts = [0, 5, 1]

    def rank_main(rank: int, low: Any, high: Any) -> Any:
        stream = stream_of(LOADERS[name](rank, counts[rank]), rank, 3, uneven, low, high)
        try:
            stream.open(0)
        except DataError as error:
            return str(error)
        return read(stream, 2)[0]

    results = Processes(3).run(rank_main)
    if uneven == "stop_all":
        assert all("has no batches in epoch 0" in result for result in results)
    else:
        assert [len(rows) for rows in results] == [5, 5, 5]
        assert results[0] == [None] * 5
        assert results[2] == [[2, 0]] * 5 if uneven == "cycle" else [[2, 0], None, None, None, None]
    assert ("yields no batches on rank 0" in caplog.text) == (uneven == "cycle")


def calls(make: Callable[[int], Any], window: int, **options: Any) -> list[int]:
    """Return how often two ranks agree: when the stream is made, when it is opened, and for each window."""
    processes = Processes(2)
    counts: list[int] = []

    def rank_main(rank: int, low: Any, high: Any) -> None:
        def note() -> None:
            if rank == 0:
                counts.append(processes.calls)

        stream = BatchStream(make(rank), shard=Shard(rank, 2, **options), agree=low)
        note()
        stream.open(0)
        note()
        read(stream, window)
        note()

    processes.run(rank_main)
    return [counts[0], counts[1] - counts[0], counts[2] - counts[1]]


def test_sharded_or_trusted_data_communicates_at_most_once() -> None:
    assert calls(lambda rank: DataLoader(range(20)), 2) == [0, 0, 0]
    assert calls(lambda rank: [1] * 20, 2) == [0, 0, 0]
    assert calls(lambda rank: [1] * 20, 2, splits=False) == [1, 2, 0]
    assert calls(lambda rank: SizedState(rank, 20), 2) == [1, 2, 0]
    assert calls(lambda rank: Own(rank, 20), 2)[2] <= 11  # one for each of ten windows, and one at the end


def test_a_window_is_not_read_further_ahead_than_one_batch() -> None:
    class Counting(Own):
        taken = 0

        def __iter__(self) -> Iterator[Any]:
            for batch in super().__iter__():
                self.taken += 1
                yield batch

    loader = Counting(0, 50)
    stream = BatchStream(loader, shard=Shard(0, 2), agree=lambda number: number)
    stream.open(0)
    for _ in range(5):
        for _ in range(stream.remaining(4)):
            stream.next_batch()
        # One that is known to follow, one that this needs to be known for, and one that the source itself reads ahead.
        assert loader.taken <= stream.position + 3


# --- resume ----------------------------------------------------------------------------------------------------------


@given(
    name=st.sampled_from(sorted(LOADERS)),
    counts=st.lists(st.integers(1, 6), min_size=2, max_size=2),
    uneven=st.sampled_from(["stop_all", "cycle", "zero_weight"]),
    window=st.integers(1, 3),
    cut=st.integers(0, 7),
)
@settings(max_examples=50, deadline=None)
def test_each_rank_goes_on_where_it_was(name: str, counts: list[int], uneven: str, window: int, cut: int) -> None:
    def make(rank: int, low: Any, high: Any) -> BatchStream:
        return stream_of(LOADERS[name](rank, counts[rank]), rank, 2, uneven, low, high)

    def whole_main(rank: int, low: Any, high: Any) -> Any:
        stream = make(rank, low, high)
        rows = []
        for epoch in range(2):
            stream.open(epoch)
            rows.append(read(stream, window)[0])
            stream.close()
        return rows

    def before_main(rank: int, low: Any, high: Any) -> Any:
        stream = make(rank, low, high)
        stream.open(0)
        rows = read(stream, window, cut)[0]
        state = stream.state_dict()
        assert state["is_per_rank"]
        return rows, state

    def after_main(rank: int, low: Any, high: Any) -> Any:
        stream = make(rank, low, high)
        stream.load_state_dict(state)
        assert stream.epoch == 0
        stream.reopen()
        assert stream.position == len(before[rank][0])
        rest = read(stream, window)[0]
        stream.close()
        stream.open(1)
        return rest, read(stream, window)[0]

    if name == "collection" and uneven == "zero_weight":
        return
    whole = Processes(2).run(whole_main)
    before = Processes(2).run(before_main)
    state = through_disk(merge_states([one[1] for one in before]))
    after = Processes(2).run(after_main)
    for rank in range(2):
        assert before[rank][0] + after[rank][0] == whole[rank][0]
        assert after[rank][1] == whole[rank][1]


def state_of(size: int, make: Callable[[int], Any], *, epoch_is_over: bool = False) -> Any:
    states = []
    for rank in range(size):
        stream = BatchStream(make(rank), shard=Shard(rank, size))
        stream.open(0)
        read(stream, 1, None if epoch_is_over else 2)
        if epoch_is_over:
            stream.close()
        states.append(stream.state_dict())
    return through_disk(merge_states(states))


@pytest.mark.parametrize("size", [1, 3])
def test_another_number_of_ranks_within_an_epoch_is_an_error(size: int) -> None:
    state = state_of(2, lambda rank: Own(rank, 5))
    stream = BatchStream(Own(0, 5), shard=Shard(0, size) if size > 1 else None)
    now = "is one process" if size == 1 else "are 3"
    with pytest.raises(DataError, match=f"by 2 processes, each with its own Own at some position; now there {now}"):
        stream.load_state_dict(state)


def test_another_number_of_ranks_between_epochs_is_fine() -> None:
    state = state_of(2, lambda rank: Own(rank, 5), epoch_is_over=True)
    stream = BatchStream(Own(2, 5), shard=Shard(2, 3))
    stream.load_state_dict(state)
    stream.open(1)
    assert read(stream, 1)[0] == [[2, number] for number in range(5)]


def test_a_loader_that_saves_itself_goes_on_with_as_many_ranks_only() -> None:
    state = state_of(2, lambda rank: SaysItsState(rank, 5), epoch_is_over=True)
    with pytest.raises(DataError, match="by 2 processes"):
        BatchStream(SaysItsState(0, 5)).load_state_dict(state)


def test_a_state_of_one_process_does_not_go_on_with_two() -> None:
    stream = BatchStream(Own(0, 5))
    stream.open(0)
    read(stream, 1, 2)
    with pytest.raises(DataError, match="by one process with its own Own at some position; now there are 2"):
        BatchStream(Own(0, 5), shard=Shard(0, 2)).load_state_dict(through_disk(stream.state_dict()))


def test_a_step_that_failed_is_repeated_from_its_beginning() -> None:
    stream = BatchStream(Own(0, 9), shard=Shard(0, 2), agree=lambda number: number)
    stream.open(0)
    read(stream, 3, 3)
    stream.remaining(3)
    stream.next_batch()
    state = through_disk(merge_states([stream.state_dict(3)] * 2))
    again = BatchStream(Own(0, 9), shard=Shard(0, 2), agree=lambda number: number)
    again.load_state_dict(state)
    again.reopen()
    assert read(again, 3)[0] == [[0, number] for number in range(3, 9)]


# --- the same data on all ranks --------------------------------------------------------------------------------------


def test_a_fingerprint_tells_batches_apart() -> None:
    batch = {"x": torch.arange(6.0).reshape(2, 3).t(), "y": [torch.ones(2, dtype=torch.bfloat16), "name"]}
    same = {"x": torch.arange(6.0).reshape(2, 3).t(), "y": [torch.ones(2, dtype=torch.bfloat16), "other"]}
    other = {"x": torch.arange(6.0).reshape(2, 3).t() + 1, "y": [torch.ones(2, dtype=torch.bfloat16), "name"]}
    prints = [fingerprint_batch(one) for one in (batch, same, other, torch.zeros(0), "no tensors")]
    assert prints[0] == prints[1] != prints[2]
    assert isinstance(prints[3], int)
    assert prints[4] is None
    assert is_same_on_all([prints[0], prints[1]])
    assert not is_same_on_all([prints[0], prints[2]])
    assert not is_same_on_all([None, None])
    assert not is_same_on_all([prints[0]])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:Sparse")
def test_a_fingerprint_of_nested_and_sparse_tensors() -> None:
    rows, other = [torch.ones(2, 3), torch.ones(1, 3)], [torch.ones(2, 3), torch.zeros(1, 3)]
    kinds: list[Any] = [partial(torch.nested.nested_tensor, layout=layout) for layout in (torch.strided, torch.jagged)]
    kinds += [lambda part: part[1].to_sparse(), lambda part: part[1].to_sparse_csr(), lambda part: part[1] * 1j]
    for kind in kinds:
        assert fingerprint_batch(kind(rows)) == fingerprint_batch(kind(rows)) != fingerprint_batch(kind(other))
    assert fingerprint_batch(torch.empty(3, device="meta")) is not None


class Meshed(TwoTensor):  # type: ignore[misc]  # not annotated
    """As a DTensor, flattened into tensors and something else."""

    mesh = "no tensor"

    def __tensor_flatten__(self) -> Any:
        names, context = super().__tensor_flatten__()
        return [*names, "mesh"], context


def test_the_parts_of_a_subclass_are_its_tensors() -> None:
    first, second = torch.ones(2), torch.zeros(2)
    found = list(strided_parts(Meshed(first, second)))
    assert [torch.equal(*pair) for pair in zip(found, (first, second), strict=True)] == [True, True]
