"""Batches of few lengths."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sharing import Ranks, plain
from torch.utils.data import DataLoader, Dataset
from toys import quiet

import loopwright as lw
from loopwright.data import BucketBatchSampler, bucket_sizes, pad_to_buckets
from loopwright.errors import ConfigError, DataError

SIZES = [8, 16, 32]


def some_lengths(count: int, *, most: int = 32) -> list[int]:
    return [random.Random(index).randint(1, most) for index in range(count)]


class Sentences(Dataset[dict[str, torch.Tensor]]):
    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        tokens = torch.arange(1, self.lengths[index] + 1)
        return {"input_ids": tokens, "labels": tokens, "index": index}


def loader_of(lengths: list[int], batch_size: int = 4, **options: Any) -> DataLoader[Any]:
    return DataLoader(
        Sentences(lengths),
        batch_sampler=BucketBatchSampler(lengths, batch_size, SIZES, **options),
        collate_fn=pad_to_buckets(SIZES, value={"labels": -100}),
    )


# --- padding ----------------------------------------------------------------------------------------------------------


def test_a_batch_gets_the_smallest_size_that_holds_it() -> None:
    collate = pad_to_buckets([4, 8])
    batch = collate([torch.tensor([1, 2, 3]), torch.tensor([4, 5])])
    assert batch.tolist() == [[1, 2, 3, 0], [4, 5, 0, 0]]
    assert collate([torch.ones(5), torch.ones(2)]).shape == (2, 8)
    assert collate([torch.ones(4), torch.ones(4)]).shape == (2, 4)


def test_each_field_has_a_value_of_its_own_and_scalars_stay() -> None:
    collate = pad_to_buckets([4], value={"labels": -100})
    batch = collate([{"input_ids": [1, 2], "labels": [3, 4], "weight": 0.5}])
    assert plain(batch) == {"input_ids": [[1, 2, 0, 0]], "labels": [[3, 4, -100, -100]], "weight": [0.5]}


def test_tuples_are_padded_by_position() -> None:
    collate = pad_to_buckets([3], keys=[0])
    images, labels = collate([(torch.ones(2), torch.tensor([1.0])), (torch.ones(1), torch.tensor([2.0]))])
    assert images.tolist() == [[1, 1, 0], [1, 0, 0]]
    assert labels.tolist() == [[1], [2]]


def test_another_dimension() -> None:
    batch = pad_to_buckets([4], dim=2)([torch.ones(2, 3), torch.ones(2, 1)])
    assert batch.shape == (2, 2, 4)
    assert batch.sum() == 8


def test_a_collator_of_ones_own_comes_first() -> None:
    def longest(samples: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"x": torch.nn.utils.rnn.pad_sequence(samples, batch_first=True), "count": torch.tensor(len(samples))}

    batch = pad_to_buckets([8], collate=longest)([torch.ones(3), torch.ones(5)])
    assert batch["x"].shape == (2, 8)
    assert batch["count"] == 2


def test_a_batch_that_is_too_long_names_length_and_sizes() -> None:
    with pytest.raises(DataError, match=r"at most 8, the largest of sizes=\[4, 8\], got 9"):
        pad_to_buckets([4, 8])([torch.ones(9)])


def test_a_batch_without_the_dimension_is_an_error() -> None:
    with pytest.raises(DataError, match="dimension 1"):
        pad_to_buckets([4])([torch.tensor(1.0)])


@pytest.mark.parametrize("sizes", [[], [0, 4], [8, 4], [4, 4]])
def test_sizes_ascend(sizes: list[int]) -> None:
    for make in (pad_to_buckets, lambda given: BucketBatchSampler([1], 1, given)):
        with pytest.raises(ConfigError, match="ascending"):
            make(sizes)


# --- sizes ------------------------------------------------------------------------------------------------------------


def positions(lengths: list[int], sizes: list[int]) -> int:
    return sum(next(size for size in sizes if size >= length) for length in lengths)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.integers(1, 4))
def test_no_other_sizes_need_less_padding(lengths: list[int], count: int) -> None:
    found = bucket_sizes(lengths, count, multiple_of=4)
    candidates = sorted({-(-length // 4) * 4 for length in lengths})
    best = min(
        positions(lengths, [*chosen, candidates[-1]])
        for number in range(count)
        for chosen in itertools.combinations(candidates[:-1], min(number, len(candidates) - 1))
    )
    assert positions(lengths, found) == best
    assert len(found) <= count
    assert all(size % 4 == 0 for size in found)


def test_very_long_samples_have_few_candidates() -> None:
    sizes = bucket_sizes([10, 100_000], 2)
    assert len(sizes) == 2
    assert sizes[-1] >= 100_000


# --- order ------------------------------------------------------------------------------------------------------------


def test_batches_are_full_and_of_one_bucket() -> None:
    lengths = some_lengths(103)
    sampler = BucketBatchSampler(lengths, 4, SIZES)
    batches = list(sampler)
    assert len(batches) == len(sampler)
    for batch in batches:
        assert len(batch) == 4
        assert len({next(size for size in SIZES if size >= lengths[index]) for index in batch}) == 1
    given_indices = [index for batch in batches for index in batch]
    assert len(set(given_indices)) == len(given_indices) >= 103 - 3 * 3


def test_without_dropping_each_sample_comes_once() -> None:
    lengths = some_lengths(103)
    sampler = BucketBatchSampler(lengths, 4, SIZES, drop_last=False)
    assert sorted(index for batch in sampler for index in batch) == list(range(103))
    assert len(list(sampler)) == len(sampler)


def test_the_order_depends_on_seed_and_epoch_only() -> None:
    lengths = some_lengths(60)

    def order(seed: int, epoch: int) -> list[list[int]]:
        torch.rand(random.randrange(5))
        sampler = BucketBatchSampler(lengths, 4, SIZES, seed=seed)
        sampler.set_epoch(epoch)
        state = torch.get_rng_state()
        found = list(sampler)
        assert torch.equal(torch.get_rng_state(), state)
        return found

    assert order(0, 1) == order(0, 1)
    assert len({str(order(seed, epoch)) for seed in (0, 1) for epoch in (0, 1)}) == 4


def test_a_bucket_has_a_batch_size_of_its_own() -> None:
    lengths = some_lengths(200)
    sampler = BucketBatchSampler(lengths, [64 // size for size in SIZES], SIZES)
    assert {len(batch) for batch in sampler} == {8, 4, 2}


def test_a_sample_that_is_too_long_is_refused_before_the_first_batch() -> None:
    with pytest.raises(ConfigError, match="got 2 longer samples, up to 50"):
        BucketBatchSampler([1, 40, 50], 2, SIZES)


@pytest.mark.parametrize("stop", [1, 5, 9])
def test_a_resumed_epoch_has_the_same_batches(stop: int) -> None:
    def seen_by(trainer: lw.Trainer, **options: Any) -> list[list[int]]:
        module = Mean()
        trainer.fit(module, loader_of(some_lengths(40)), **options)
        return module.seen

    whole = seen_by(quiet(max_epochs=2))
    first = quiet(max_steps=stop)
    begun = seen_by(first)
    first.save_checkpoint("at.ckpt")
    assert begun + seen_by(quiet(max_epochs=2), ckpt_path="at.ckpt") == whole


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_take_turns_and_groups_keep_them_in_one_bucket(size: int) -> None:
    lengths = some_lengths(120)
    ranks = Ranks(lambda: loader_of(lengths, group=size), size)
    alone = [plain(batch)["index"] for batch in loader_of(lengths, group=size)]
    rounds = ranks.epoch(0)
    assert [batch["index"] for one in rounds for batch in one] == alone[: len(rounds) * size]
    widths = [{len(batch["input_ids"][0]) for batch in one} for one in rounds]
    mixed = [number for number, found in enumerate(widths) if len(found) > 1]
    assert all(number >= len(rounds) - 3 for number in mixed)  # the groups' rests, at the end


# --- graphs -----------------------------------------------------------------------------------------------------------


class Mean(lw.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(64, 4)
        self.seen: list[list[int]] = []

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        return self.embedding(batch["input_ids"]).square().mean()

    def on_train_batch_start(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        self.seen.append(batch["index"].tolist())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Graphs:
    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph: Any, inputs: Any) -> Callable[..., Any]:
        self.count += 1
        return graph.forward  # type: ignore[no-any-return]


@pytest.fixture
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")  # torch's own imports
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # dynamo's own
def test_there_is_one_graph_for_each_bucket() -> None:
    graphs = Graphs()
    lengths = some_lengths(80)
    quiet(max_epochs=2, compile={"backend": graphs, "dynamic": False}).fit(Mean(), loader_of(lengths))
    assert graphs.count == len(SIZES)
