"""One stream of batches is distributed over the ranks, in the order and with the numbers of one process."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from sharing import Numbers, Ranks, by_hand, deal, plain, seed, through_disk
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from loopwright.data import NO_BATCH, BatchStream, CombinedLoader, Shard, capture_rng, restore_rng
from loopwright.errors import DataError


def loader(size: int, batch_size: int | None = 2, **options: Any) -> DataLoader:
    return DataLoader(Numbers(size), batch_size=batch_size, **options)


class DrawsAllTheTime(Sampler):
    """Draws each index when it is asked for it, or shuffles a buffer."""

    def __init__(self, size: int, kind: str) -> None:
        self.size = size
        self.kind = kind

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        for _ in range(self.size):
            if self.kind == "python":
                yield random.randrange(self.size)
            elif self.kind == "numpy":
                yield int(np.random.randint(self.size))
            else:
                yield int(torch.randint(self.size, ()))


class BeginsToDrawLate(Sampler):
    """Its first batch is always the same."""

    def __init__(self, size: int, kind: str = "torch") -> None:
        self.size = size
        self.kind = kind

    def __iter__(self) -> Iterator[int]:
        yield from range(4)
        for _ in range(4, self.size):
            yield int(torch.randint(self.size, ())) if self.kind == "torch" else int(np.random.randint(self.size))

    def __len__(self) -> int:
        return self.size


class OwnOrder(Sampler):
    """Keeps a generator across epochs, and draws from it once more when it ends."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.rng = np.random.default_rng(5)

    def __iter__(self) -> Iterator[int]:
        yield from self.rng.permutation(self.size).tolist()
        self.rng.random()

    def __len__(self) -> int:
        return self.size


class SavesItself(Sampler):
    """Order from a counter that only its own state knows."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.count = 0

    def __iter__(self) -> Iterator[int]:
        self.count += 1
        return iter(torch.randperm(self.size, generator=torch.Generator().manual_seed(self.count)).tolist())

    def __len__(self) -> int:
        return self.size

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


class ByEpoch(Sampler):
    def __init__(self, size: int) -> None:
        self.size = size
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(self.size, generator=torch.Generator().manual_seed(self.epochs[-1])).tolist())

    def __len__(self) -> int:
        return self.size


class UnsizedBatches:
    """A batch sampler without a length, with batches of unequal size."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(self.size).tolist()
        while order:
            size = random.randint(1, 3)
            yield order[:size]
            order = order[size:]


class ReusesList:
    """A batch sampler that fills one list again and again."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[list[int]]:
        batch: list[int] = []
        for index in torch.randperm(self.size).tolist():
            batch.append(index)
            if len(batch) == 2:
                yield batch
                batch.clear()


SAMPLERS: dict[str, Callable[[int], Any]] = {
    "in order": lambda n: loader(n),
    "shuffle": lambda n: loader(n, shuffle=True),
    "drop_last": lambda n: loader(n, 3, shuffle=True, drop_last=True),
    "generator": lambda n: loader(n, shuffle=True, generator=torch.Generator().manual_seed(7)),
    "weighted": lambda n: loader(n, sampler=WeightedRandomSampler([1.0 + i for i in range(n)], n)),
    "replacement": lambda n: loader(n, sampler=RandomSampler(Numbers(n), replacement=True, num_samples=40)),
    "batch sampler": lambda n: DataLoader(Numbers(n), batch_sampler=BatchSampler(RandomSampler(Numbers(n)), 4, False)),
    "list of batches of indices": lambda n: DataLoader(Numbers(n), batch_sampler=[[1, 2], [0], [5, 4, 3], [6], [7]]),
    "no batching": lambda n: loader(n, None, shuffle=True),
    "own generator": lambda n: loader(n, sampler=OwnOrder(n)),
    "saves itself": lambda n: loader(n, sampler=SavesItself(n)),
    "set_epoch": lambda n: loader(n, sampler=ByEpoch(n)),
    "list": lambda n: [torch.full((2,), number) for number in range(n)],
}
# These draw between batches, from random numbers of their own: their order is that of one stream, not of a plain loop.
STREAMED: dict[str, Callable[[int], Any]] = {
    "python all the time": lambda n: loader(n, sampler=DrawsAllTheTime(n, "python")),
    "numpy all the time": lambda n: loader(n, sampler=DrawsAllTheTime(n, "numpy")),
    "torch all the time": lambda n: loader(n, sampler=DrawsAllTheTime(n, "torch")),
    "torch, begins late": lambda n: loader(n, sampler=BeginsToDrawLate(n)),
    "unsized batch sampler": lambda n: DataLoader(Numbers(n), batch_sampler=UnsizedBatches(n)),
    "one list for all batches": lambda n: DataLoader(Numbers(n), batch_sampler=ReusesList(n)),
}
ALL = {**SAMPLERS, **STREAMED}


def alone(make: Callable[[], Any], epochs: int = 1) -> list[list[Any]]:
    """Return the batches of each epoch, as one rank that reads everything gives them."""
    ranks = Ranks(make, 1)
    return [deal(ranks.epoch(epoch)) for epoch in range(epochs)]


def expected(batches: list[Any], size: int, uneven: str) -> list[Any]:
    """Return the batches that the ranks read in a whole epoch, in order."""
    full = len(batches) // size * size
    if uneven == "stop_all" or full == len(batches):
        return batches[:full]
    missing = full + size - len(batches)
    filled = [batches[number % len(batches)] for number in range(missing)]
    return batches + (filled if uneven == "cycle" else [NO_BATCH] * missing)


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_deal_out_what_one_process_reads(name: str, size: int) -> None:
    # A rank trains on fewer batches, so a later epoch begins elsewhere where training draws, too.
    whole = list(by_hand(lambda: SAMPLERS[name](11), 3, draws=False))
    ranks = Ranks(lambda: SAMPLERS[name](11), size, draws=False)
    for epoch in range(3):
        assert deal(ranks.epoch(epoch)) == expected(whole[epoch], size, "stop_all")
        assert ranks.streams[0].describe_order() == ranks.streams[1].describe_order()


@pytest.mark.parametrize("name", ["unsized batch sampler", "one list for all batches", "numpy all the time"])
def test_samplers_that_go_on_drawing_are_equal_on_all_ranks(name: str) -> None:
    ranks, others = (Ranks(lambda: ALL[name](11), size, draws=False) for size in (2, 3))
    for epoch in range(2):
        two, three = deal(ranks.epoch(epoch)), deal(others.epoch(epoch))
        shortest = min(len(two), len(three))
        assert two[:shortest] == three[:shortest]
        if name != "numpy all the time":
            samples = [index for batch in two for index in batch]
            assert len(set(samples)) == len(samples)


@given(
    n=st.integers(1, 40),
    batch_size=st.integers(1, 6),
    size=st.integers(1, 7),
    uneven=st.sampled_from(["stop_all", "cycle", "zero_weight"]),
    drop_last=st.booleans(),
    name=st.sampled_from(["shuffle", "in order", "own", "unsized", "list"]),
    limit=st.sampled_from([None, 1, 2, 5, 0.5]),
)
@settings(max_examples=50, deadline=None)
def test_any_epoch_is_sharded(
    n: int, batch_size: int, size: int, uneven: str, drop_last: bool, name: str, limit: Any
) -> None:
    def make() -> Any:
        if name == "list":
            return [torch.tensor([number]) for number in range(n)]
        if name == "unsized":
            return DataLoader(Numbers(n), batch_sampler=UnsizedBatches(n))
        sampler = {"shuffle": RandomSampler, "in order": SequentialSampler}.get(name, lambda data: OwnOrder(len(data)))
        return loader(n, batch_size, sampler=sampler(Numbers(n)), drop_last=drop_last)

    assume(name != "unsized" or limit != 0.5)
    whole = alone(make)[0] if name == "unsized" else next(by_hand(make))
    read = expected(whole, size, uneven)
    rounds = len(read) // size
    if isinstance(limit, int):
        rounds = min(rounds, limit)
    elif limit is not None:
        assume(int(rounds * limit) > 0)
        rounds = int(rounds * limit)
    ranks = Ranks(make, size, uneven=uneven, limit=limit)
    if not rounds:
        with pytest.raises(DataError, match="no batches in epoch 0"):
            ranks.open(0)
        return
    assert deal(ranks.epoch(0)) == read[: rounds * size]
    assert ranks.same(lambda stream: stream.position) == rounds


@given(
    n=st.integers(1, 40),
    sizes=st.tuples(st.integers(1, 5), st.integers(1, 5), st.integers(1, 5)),
    cuts=st.tuples(st.integers(0, 6), st.integers(0, 6)),
    uneven=st.sampled_from(["stop_all", "cycle", "zero_weight"]),
    name=st.sampled_from(sorted({*ALL} - {"torch, begins late"})),  # with one process it draws from outside
    back=st.integers(0, 2),
)
@settings(max_examples=50, deadline=None)
def test_each_batch_is_read_once_whatever_the_number_of_ranks_before_and_after_stops(
    n: int, sizes: tuple[int, ...], cuts: tuple[int, ...], uneven: str, name: str, back: int
) -> None:
    assume(n >= 8 or name != "list of batches of indices")

    def make() -> Any:
        return ALL[name](n)

    try:
        (whole,) = alone(make)
    except DataError:
        assume(False)
    given_batches: list[Any] = []
    ranks = Ranks(make, sizes[0], uneven=uneven)
    if len(expected(whole, sizes[0], uneven)) == 0:
        return
    ranks.open(0)
    positions = 0
    for size, cut in zip(sizes[1:], cuts, strict=True):
        given_batches += deal(ranks.rounds(cut))
        position = ranks.same(lambda stream: stream.position)
        again = max(0, min(back, position - positions))  # as of before the last resume nobody can tell
        state = ranks.state(position - again)
        if again:
            given_batches = given_batches[: -again * ranks.size]
        ranks = Ranks(make, size, uneven=uneven, first_seed=77)
        ranks.resume(state)
        positions = ranks.same(lambda stream: stream.position)
        assert positions == position - again
    rest = ranks.rounds()
    assert ranks.same(lambda stream: stream.position) == positions + len(rest)
    given_batches += deal(rest)
    true = [batch for batch in given_batches if batch is not NO_BATCH]
    count = len(whole)
    if uneven == "stop_all":
        assert true == whole[: len(true)]
        assert count - len(true) < sizes[-1]
    else:
        assert true[:count] == whole
        assert uneven == "cycle" or len(true) == count


def test_what_a_collection_of_ranks_left_out_is_read_when_fewer_go_on() -> None:
    ranks = Ranks(lambda: loader(7, 1), 3)
    ranks.open(0)
    given_batches = deal(ranks.rounds())
    assert given_batches == [[number] for number in range(6)]
    one = Ranks(lambda: loader(7, 1), 1)
    one.resume(ranks.state())
    assert deal(one.rounds()) == [[6]]


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("uneven", ["stop_all", "zero_weight"])
def test_resume_on_as_many_ranks_equals_the_uninterrupted_run(name: str, uneven: str) -> None:
    def make() -> Any:
        return ALL[name](13)

    whole = Ranks(make, 2, uneven=uneven)
    rows = [whole.epoch(epoch) for epoch in range(3)]
    for cut in range(len(rows[0]) + 1):
        before = Ranks(make, 2, uneven=uneven)
        before.open(0)
        start = before.rounds(cut)
        after = Ranks(make, 2, uneven=uneven, first_seed=50)
        after.resume(before.state())
        after.rngs = before.rngs
        start += after.rounds()
        assert [start, after.epoch(1), after.epoch(2)] == rows, cut


@pytest.mark.parametrize("name", ["shuffle", "generator", "own generator", "saves itself", "list"])
def test_resume_between_epochs_equals_the_uninterrupted_run(name: str) -> None:
    def make() -> Any:
        return ALL[name](13)

    whole = Ranks(make, 2)
    rows = [whole.epoch(epoch) for epoch in range(2)]
    before = Ranks(make, 2)
    before.epoch(0)
    before.on_each(lambda stream: stream.close())
    after = Ranks(make, 2, first_seed=50)
    after.resume(before.state())
    after.rngs = before.rngs
    assert after.epoch(1) == rows[1]


def test_old_states_without_the_newer_entries_go_on() -> None:
    (whole,) = by_hand(lambda: loader(10, shuffle=True))
    one = Ranks(lambda: loader(10, shuffle=True), 1)
    one.open(0)
    start = deal(one.rounds(1))
    state = one.state()
    for entry in ("rounds", "samples", "is_exhausted"):
        del state[entry]
    two = Ranks(lambda: loader(10, shuffle=True), 2)
    two.resume(state)
    assert start + deal(two.rounds()) == whole


def test_each_rank_fetches_its_own_samples_only() -> None:
    ranks = Ranks(lambda: loader(12, 2, shuffle=True), 3)
    given_batches = ranks.epoch(0)
    for rank, stream in enumerate(ranks.streams):
        mine = [index for round_ in given_batches for index in round_[rank]]
        assert stream.loader.dataset.reads == mine


def test_generators_of_other_ranks_stay_where_they_are() -> None:
    ranks = Ranks(lambda: loader(8, shuffle=True), 2)
    before = ranks.rngs[1]
    ranks.open(0)
    assert repr(ranks.rngs[1]) == repr(before)
    assert torch.equal(ranks.rngs[1][2], before[2])
    seed()
    alone_stream = BatchStream(loader(8, shuffle=True))
    alone_stream.open(0)
    assert torch.equal(ranks.rngs[0][2], torch.get_rng_state())


def test_set_epoch_is_called_once_per_epoch() -> None:
    ranks = Ranks(lambda: loader(8, sampler=ByEpoch(8)), 2)
    ranks.epoch(3)
    state_of_open = ranks.open(4) or ranks.state()
    again = Ranks(lambda: loader(8, sampler=ByEpoch(8)), 2)
    again.resume(state_of_open)
    assert [stream.loader.sampler.epochs for stream in ranks.streams] == [[3, 4], [3, 4]]
    assert [stream.loader.sampler.epochs for stream in again.streams] == [[4], [4]]


# --- batch size ------------------------------------------------------------------------------------------------------


@given(
    n=st.integers(2, 60),
    old=st.tuples(st.integers(1, 6), st.integers(1, 3)),
    new=st.tuples(st.integers(1, 6), st.integers(1, 3)),
    cut=st.integers(1, 5),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
)
@settings(max_examples=50, deadline=None)
def test_another_batch_size_goes_on_after_the_same_samples_or_is_an_error(
    n: int, old: tuple[int, int], new: tuple[int, int], cut: int, shuffle: bool, drop_last: bool
) -> None:
    (batch_size, size), (new_batch_size, new_size) = old, new
    assume(batch_size != new_batch_size)
    before = Ranks(lambda: loader(n, batch_size, shuffle=shuffle, drop_last=drop_last), size)
    try:
        before.open(0)
    except DataError:
        return
    start = [index for batch in deal(before.rounds(cut)) for index in batch]
    after = Ranks(lambda: loader(n, new_batch_size, shuffle=shuffle), new_size, uneven="zero_weight", first_seed=9)
    is_over = len(start) == n or (drop_last and len(start) // batch_size == n // batch_size)
    if len(start) % new_batch_size and not is_over:
        with pytest.raises(DataError, match=f"{batch_size} samples in a batch; now there are {new_batch_size}"):
            after.resume(before.state())
        return
    after.resume(before.state())
    rest = [index for batch in deal(after.rounds()) if batch is not NO_BATCH for index in batch]
    if is_over:
        assert not rest
        return
    assert sorted(start + rest) == list(range(n))
    # A state taken then has the new batch size's digest.
    again = Ranks(lambda: loader(n, new_batch_size, shuffle=shuffle), new_size, uneven="zero_weight", first_seed=8)
    again.resume(after.state())
    assert again.rounds() == []


def test_another_order_is_noticed_with_another_batch_size_too() -> None:
    seed(1)
    one = Ranks(lambda: loader(16, 4, shuffle=True, generator=torch.Generator().manual_seed(1)), 1)
    one.open(0)
    one.rounds(2)
    state = one.state()
    state["opening"]["generators"] = {}
    two = Ranks(lambda: loader(16, 2, shuffle=True, generator=torch.Generator().manual_seed(2)), 1)
    with pytest.raises(DataError, match="returned other indices"):
        two.resume(state)


# --- limits ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("limit", "rounds"), [(3, 3), (0.5, 5), (1.0, 10), (None, 10), (99, 10)])
def test_a_limit_counts_batches_of_one_process(limit: Any, rounds: int) -> None:
    ranks = Ranks(lambda: loader(40), 2, limit=limit)
    assert ranks.same(lambda stream: stream.num_batches) == rounds
    assert len(ranks.epoch(0)) == rounds


@pytest.mark.parametrize(("limit", "total"), [(None, 40), (0.5, 20), (6, 24)])
def test_an_epoch_ends_where_as_many_ranks_would_end_it(limit: Any, total: int) -> None:
    two = Ranks(lambda: loader(40, 1), 2, limit=limit)
    two.open(0)
    start = deal(two.rounds(4))
    four = Ranks(lambda: loader(40, 1), 4, limit=limit)
    four.resume(two.state())
    assert len(start + deal(four.rounds())) == total


# --- uneven ----------------------------------------------------------------------------------------------------------


def test_stop_all_says_how_much_it_leaves_out(caplog: pytest.LogCaptureFixture) -> None:
    ranks = Ranks(lambda: loader(11, 2, shuffle=True), 4)
    ranks.epoch(0)
    ranks.epoch(1)
    texts = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert len(texts) == 1
    assert "3 of 11 samples are left out of each epoch: 6 batches are not divisible by 4 processes" in texts[0]
    assert "uneven='cycle'" in texts[0]


def test_what_goes_round_is_not_worth_a_word(caplog: pytest.LogCaptureFixture) -> None:
    Ranks(lambda: loader(12, 2), 3).epoch(0)
    Ranks(lambda: loader(11, 2), 4, uneven="cycle").epoch(0)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("uneven", ["cycle", "zero_weight"])
def test_fewer_batches_than_ranks(uneven: str) -> None:
    given_batches = Ranks(lambda: loader(2, 1), 5, uneven=uneven).epoch(0)
    filled = [[0], [1], [0]] if uneven == "cycle" else [NO_BATCH] * 3
    assert given_batches == [[[0], [1], *filled]]


def test_fewer_batches_than_ranks_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(DataError, match=r"2 batches for 5 processes: pass a smaller batch_size"):
        Ranks(lambda: loader(2, 1), 5).open(0)


# --- workers ---------------------------------------------------------------------------------------------------------


class Augmented(Dataset):
    def __init__(self, size: int) -> None:
        self.size = size
        self.rng = np.random.default_rng(3)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        draws = [random.random(), np.random.normal(), torch.rand(()).item(), self.rng.random()]
        return torch.tensor([float(index), *draws], dtype=torch.float64)


@pytest.mark.parametrize("options", [{"num_workers": 1}, {"num_workers": 2, "persistent_workers": True}])
def test_augmentation_in_workers_does_not_depend_on_the_number_of_ranks(options: dict[str, Any]) -> None:
    def make() -> Any:
        return DataLoader(Augmented(10), batch_size=2, shuffle=True, **options)

    seen = []
    for size in (1, 2, 3):
        ranks = Ranks(make, size, uneven="zero_weight", draws=False)
        seen.append([[b for b in deal(ranks.epoch(epoch)) if b is not NO_BATCH] for epoch in range(2)])
        ranks.on_each(lambda stream: stream.shut_down())
    assert seen[0] == seen[1] == seen[2]
    assert seen[0][0] != seen[0][1]


def test_resume_with_workers_on_another_number_of_ranks() -> None:
    def make() -> Any:
        return DataLoader(Augmented(14), batch_size=2, shuffle=True, num_workers=1, persistent_workers=True)

    one = Ranks(make, 1, draws=False)
    one.epoch(0)
    whole = deal(one.epoch(1))
    one.on_each(lambda stream: stream.shut_down())
    two = Ranks(make, 2, draws=False)
    two.epoch(0)
    two.open(1)
    start = deal(two.rounds(2))
    state = two.state()
    two.on_each(lambda stream: stream.shut_down())
    three = Ranks(make, 3, first_seed=5)
    three.resume(state)
    assert start + deal(three.rounds()) == whole
    three.on_each(lambda stream: stream.shut_down())


def test_generators_of_the_data_set_are_saved_per_rank() -> None:
    def make() -> Any:
        return DataLoader(Augmented(16), batch_size=2, shuffle=True)

    def rows(ranks: Ranks) -> Any:
        return [[batch and [sample[4] for sample in batch] for batch in given] for given in ranks.rounds()]

    whole = Ranks(make, 2)
    whole.open(0)
    whole.streams[1].loader.dataset.rng = np.random.default_rng(4)  # the user's way to make ranks differ
    whole.rounds(1)
    state = whole.state()
    assert state["is_per_rank"]
    assert len(state["ranks"]) == 2
    again = Ranks(make, 2)
    again.resume(state)
    assert rows(again) == rows(whole)
    other = Ranks(make, 3)
    other.resume(state)  # the order goes on; the data set's generators are rank 0's where there was no such rank
    assert len(other.rounds()) == 2


# --- errors ----------------------------------------------------------------------------------------------------------


def test_an_order_that_differs_between_ranks_shows() -> None:
    class Entropy(Sampler):
        def __iter__(self) -> Iterator[int]:
            order = list(range(20))
            random.SystemRandom().shuffle(order)
            return iter(order)

        def __len__(self) -> int:
            return 20

    ranks = Ranks(lambda: loader(20, sampler=Entropy()), 2)
    ranks.open(0)
    orders = ranks.on_each(lambda stream: stream.describe_order())
    assert orders[0] != orders[1]


def test_a_sampler_that_begins_to_draw_from_numpy_is_an_error() -> None:
    ranks = Ranks(lambda: loader(20, sampler=BeginsToDrawLate(20, "numpy")), 2)
    ranks.open(0)
    with pytest.raises(DataError, match="BatchSampler began to draw from NumPy's global generator"):
        ranks.rounds()


def test_training_may_draw_from_numpy_meanwhile() -> None:
    ranks = Ranks(lambda: loader(20, sampler=OwnOrder(20)), 2)
    assert len(ranks.epoch(0)) == 5


def test_another_data_set_is_an_error() -> None:
    ranks = Ranks(lambda: loader(20), 2)
    ranks.open(0)
    ranks.rounds(1)
    with pytest.raises(DataError, match="20 samples in the data set; now there are 18"):
        Ranks(lambda: loader(18), 3).resume(ranks.state())


def test_a_digest_of_long_ago_is_not_compared() -> None:
    ranks = Ranks(lambda: loader(2400, 1, shuffle=True), 2)
    ranks.open(0)
    given_batches = ranks.rounds(700)
    state = ranks.state(20)
    assert state["fingerprint"]["digest"] is None
    assert state["position"] == 40
    again = Ranks(lambda: loader(2400, 1, shuffle=True), 2)
    again.resume(state)
    assert again.rounds(10) == given_batches[20:30]


# --- collections -----------------------------------------------------------------------------------------------------


def collection() -> Any:
    return {"a": loader(24, 2, shuffle=True), "b": [loader(7, 1, shuffle=True), [torch.zeros(1), torch.ones(1)]]}


@pytest.mark.parametrize("size", [2, 3])
def test_a_collection_is_sharded_by_its_members(size: int) -> None:
    (whole,) = by_hand(lambda: loader(24, 2, shuffle=True))
    ranks = Ranks(collection, size)
    assert ranks.streams[0].is_sharded
    given_batches = deal(ranks.epoch(0))
    assert [batch["a"] for batch in given_batches] == whole
    first_pass = [batch["b"][0][0] for batch in given_batches][:7]
    assert sorted(first_pass) == list(range(7))
    assert len(given_batches) == 12


def test_a_short_member_of_a_collection_repeats_even_if_it_does_not_go_round() -> None:
    ranks = Ranks(lambda: [loader(12, 1), loader(1, 1)], 4)
    assert [batch[1] for batch in deal(ranks.epoch(0))] == [[0]] * 12


@pytest.mark.parametrize("mode", ["min_size", "max_size", "sequential", "max_size_cycle"])
def test_the_order_of_a_collection_is_known_when_its_epoch_has_begun(mode: str) -> None:
    def order(data: CombinedLoader) -> int | None:
        stream = BatchStream(data, shard=Shard(0, 2))
        stream.open(0, shared_rng=capture_rng())
        return stream.describe_order()

    both = [CombinedLoader([loader(10, 2), loader(4, 2)], mode) for _ in range(2)]
    assert order(both[0]) == order(both[1]) is not None
    assert order(CombinedLoader([DataLoader(range(9, 0, -1), 2), loader(4, 2)], mode)) is not None  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", ["min_size", "max_size", "sequential", "max_size_cycle"])
@pytest.mark.parametrize("uneven", ["stop_all", "cycle", "zero_weight"])
def test_modes_of_combined_loaders(mode: str, uneven: str) -> None:
    def make() -> CombinedLoader:
        return CombinedLoader([loader(10, 2), loader(3, 1)], mode)

    rounds = Ranks(make, 2, uneven=uneven).epoch(0)
    expected_rounds = {
        ("min_size", "stop_all"): 1,
        ("min_size", "cycle"): 2,
        ("min_size", "zero_weight"): 2,
        ("sequential", "stop_all"): 3,
        ("sequential", "cycle"): 5,
        ("sequential", "zero_weight"): 5,
    }.get((mode, uneven), 2 if uneven == "stop_all" else 3)
    assert len(rounds) == expected_rounds
    true = [batch for batch in deal(rounds) if batch is not NO_BATCH]
    if mode == "sequential":
        firsts = [index for batch in true for index in batch]
        assert len(firsts) == {"stop_all": 8 + 2, "cycle": 10 + 2 + 3 + 1, "zero_weight": 13}[uneven]
    elif uneven == "zero_weight":
        assert len(true) == (3 if mode == "min_size" else 5)
    if mode == "max_size":
        nones = [batch[1] is None for batch in true]
        assert any(nones)


@given(
    sizes=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    cut=st.integers(0, 7),
    mode=st.sampled_from(["min_size", "max_size", "sequential", "max_size_cycle"]),
    uneven=st.sampled_from(["stop_all", "cycle", "zero_weight"]),
)
@settings(max_examples=30, deadline=None)
def test_a_collection_goes_on_with_another_number_of_ranks(
    sizes: tuple[int, int], cut: int, mode: str, uneven: str
) -> None:
    def make() -> CombinedLoader:
        return CombinedLoader({"a": loader(20, 2, shuffle=True), "b": loader(14, 2, shuffle=True)}, mode)

    before = Ranks(make, sizes[0], uneven=uneven)
    before.open(0)
    start = deal(before.rounds(cut))
    state = before.state()
    after = Ranks(make, sizes[1], uneven=uneven, first_seed=3)
    after.resume(state)
    if sizes[0] == sizes[1]:
        after.rngs = before.rngs
    rest = deal(after.rounds())
    read = [batch for batch in start + rest if batch is not NO_BATCH]
    if mode == "sequential":
        samples = [index for batch in read for index in batch]
        assert len(set(samples)) >= 20 - 4 * max(sizes)
        if uneven == "zero_weight":
            assert sorted(samples) == sorted([*range(20), *range(14)])
        return
    samples = [index for batch in read if batch["a"] is not None for index in batch["a"]]
    if uneven != "cycle":
        assert len(set(samples)) == len(samples)
    if uneven == "zero_weight" and mode != "min_size":
        assert sorted(samples) == list(range(20))
    if sizes[0] == sizes[1]:
        whole = Ranks(make, sizes[0], uneven=uneven)
        assert start + rest == deal(whole.epoch(0))


# --- loaders that know their rank, in one process ---------------------------------------------------------------------


def test_a_sampler_that_knows_its_rank_is_left_alone() -> None:
    from torch.utils.data import DistributedSampler

    data = Numbers(8)
    streams = []
    for rank in range(2):
        sampler = DistributedSampler(data, num_replicas=2, rank=rank, shuffle=False)
        streams.append(BatchStream(DataLoader(data, sampler=sampler, batch_size=2), shard=Shard(rank, 2)))
        streams[rank].open(0, capture_rng())
        assert not streams[rank].is_sharded
    given_batches = []
    for stream in streams:
        while stream.has_next():
            given_batches.append(plain(stream.next_batch()))
    assert given_batches == [[0, 2], [4, 6], [1, 3], [5, 7]]


def test_a_sampler_with_other_replicas_is_named(caplog: pytest.LogCaptureFixture) -> None:
    from torch.utils.data import DistributedSampler

    data = Numbers(8)
    sampler = DistributedSampler(data, num_replicas=1, rank=0)
    BatchStream(DataLoader(data, sampler=sampler), shard=Shard(1, 2))
    assert "DistributedSampler has num_replicas=1 and rank=0 on rank 1 of 2 processes" in caplog.text


def test_data_that_is_not_to_be_split_is_read_fully() -> None:
    ranks = Ranks(lambda: loader(6, 2), 2, splits=False)
    assert ranks.epoch(0) == [[[0, 1]] * 2, [[2, 3]] * 2, [[4, 5]] * 2]


def test_states_of_sharded_and_unsharded_data_are_not_mixed_up() -> None:
    def state(*, splits: bool) -> Any:
        ranks = Ranks(lambda: loader(12, 2), 2, splits=splits)
        ranks.open(0)
        ranks.rounds(1)
        return ranks.state()

    with pytest.raises(DataError, match="each process read its own DataLoader; now its batches are distributed"):
        Ranks(lambda: loader(12, 2), 2).resume(state(splits=False))
    with pytest.raises(DataError, match="was distributed over the processes; now each process reads its own"):
        Ranks(lambda: loader(12, 2), 2, splits=False).resume(state(splits=True))
    with pytest.raises(DataError, match="by 2 processes, each with its own DataLoader .* now there are 3"):
        Ranks(lambda: loader(12, 2), 3, splits=False).resume(state(splits=False))
    with pytest.raises(DataError, match="by 2 processes, each with its own DataLoader .* now there is one process"):
        Ranks(lambda: loader(12, 2), 1).resume(state(splits=False))


def test_the_public_names_are_there() -> None:
    import loopwright.data as data

    for name in data.__all__:
        assert getattr(data, name) is not None
    with pytest.raises(AttributeError, match="Sharrd"):
        data.Sharrd  # noqa: B018


def test_restoring_is_up_to_the_caller() -> None:
    seed(4)
    before = capture_rng()
    ranks = Ranks(lambda: loader(8, shuffle=True), 2)
    ranks.open(0)
    state = through_disk(ranks.streams[1].state_dict())
    stream = BatchStream(loader(8, shuffle=True), shard=Shard(1, 2))
    stream.load_state_dict(state)
    stream.reopen()
    restore_rng(before)
    assert stream.has_next()
