"""Data of real processes: what is dealt out, what they agree on through gloo, and how a run goes on with others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from loader_kinds import check_resume
from ranks import run_ranks
from sharing import Numbers, draw, plain, seed, through_disk
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

import loopwright as lw
from loopwright.data import (
    NO_BATCH,
    BatchStream,
    Shard,
    capture_rng,
    in_loader_order,
    merge_states,
    restore_rng,
    shard_eval,
)
from loopwright.errors import DataError


def share(value: Any) -> Any:
    """Return rank 0's object, on all ranks."""
    box = [value]
    dist.broadcast_object_list(box)
    return box[0]


def gather(value: Any) -> list[Any]:
    """Return the objects of all ranks."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def make_agree(uneven: str) -> Any:
    operation = dist.ReduceOp.MIN if uneven == "stop_all" else dist.ReduceOp.MAX

    def agree(number: int) -> int:
        tensor = torch.tensor(number)
        dist.all_reduce(tensor, operation)
        return int(tensor)

    return agree


def make_stream(loader: Any, rank: int, size: int, uneven: str = "stop_all") -> BatchStream:
    return BatchStream(loader, shard=Shard(rank, size, uneven), agree=make_agree(uneven))


def enter(stream: BatchStream, epoch: int, state: Any = None) -> None:
    if state is None:
        stream.open(epoch, share(capture_rng()))
        return
    stream.load_state_dict(state["data"])
    stream.reopen()
    rngs = state["rngs"]
    if len(rngs) == dist.get_world_size():
        restore_rng(rngs[dist.get_rank()])


def train(stream: BatchStream, most: int | None = None, window: int = 2) -> list[Any]:
    """Return the batches of all ranks, in the order in which they were dealt."""
    rows: list[Any] = []
    while most is None or len(rows) < most:
        size = stream.remaining(window if most is None else min(window, most - len(rows)))
        if not size:
            break
        for _ in range(size):
            assert stream.has_next()
            batch = stream.next_batch()
            rows.append(None if batch is NO_BATCH else plain(batch))
            draw()
    return [batch for round_ in zip(*gather(rows), strict=True) for batch in round_]


def save(stream: BatchStream) -> Any:
    state = stream.state_dict()
    if state.get("is_per_rank"):
        state = merge_states(gather(state))
    return through_disk({"data": state, "rngs": gather(capture_rng())})


# --- dealt out -------------------------------------------------------------------------------------------------------


def part_of_an_epoch(rank: int, size: int, uneven: str, workers: int, state: Any, most: int | None) -> Any:
    seed(rank)
    loader = DataLoader(Numbers(41), batch_size=2, shuffle=True, num_workers=workers)
    stream = make_stream(loader, rank, size, uneven)
    enter(stream, 0, state)
    assert len(set(gather(stream.describe_order()))) == 1
    rows = train(stream, most)
    saved = save(stream)
    stream.shut_down()
    return rows, saved


@pytest.mark.parametrize("workers", [0, 1])
def test_a_run_goes_on_with_other_numbers_of_processes_and_reads_each_sample_once(workers: int) -> None:
    state: Any = None
    rows: list[Any] = []
    for size, most in ((2, 3), (4, 2), (1, 2), (3, None)):
        part, state = run_ranks(part_of_an_epoch, size, "zero_weight", workers, state, most)[0]
        rows += part
    assert state["data"]["position"] == 21
    samples = [index for batch in rows if batch is not None for index in batch]
    assert sorted(samples) == list(range(41))
    seed()
    whole = [plain(batch) for batch in DataLoader(Numbers(41), batch_size=2, shuffle=True, num_workers=workers)]
    assert [batch for batch in rows if batch is not None] == whole


# --- agreed ----------------------------------------------------------------------------------------------------------


class OfItsOwn(IterableDataset):
    """Draws noise; every rank has another number of samples."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Any]:
        for number in range(self.count):
            yield torch.tensor([float(number), float(torch.rand(())), np.random.rand()])


class Noise(Dataset):
    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([float(index), float(torch.rand(()))])


def make_loader(kind: str, count: int) -> Any:
    own = DataLoader(OfItsOwn(count), batch_size=None)
    return own if kind == "iterable" else {"own": own, "dealt": DataLoader(Noise(), batch_size=2, shuffle=True)}


def uneven_lengths(rank: int, size: int, kind: str, counts: list[int], uneven: str) -> Any:
    seed(rank)
    stream = make_stream(make_loader(kind, counts[rank]), rank, size, uneven)
    rows = []
    for epoch in range(2):
        try:
            enter(stream, epoch)
        except DataError as error:
            return str(error)
        rows.append(len(train(stream)) // size)
        stream.close()
    return rows


@pytest.mark.parametrize(("uneven", "rounds"), [("stop_all", None), ("cycle", 5), ("zero_weight", 5)])
def test_lengths_of_nothing_five_and_one_do_not_hang(uneven: str, rounds: int | None) -> None:
    results = run_ranks(uneven_lengths, 3, "iterable", [0, 5, 1], uneven)
    if rounds is None:
        assert all("has no batches" in result for result in results)
    else:
        assert results == [[rounds, rounds]] * 3


def stopped_and_whole(rank: int, size: int, kind: str, uneven: str, cut: int) -> Any:
    """Return the rows of a run that was never stopped, and those of one that was stopped and went on."""
    counts = [7, 5]

    def begin(first_seed: int) -> BatchStream:
        seed(first_seed + rank)
        return make_stream(make_loader(kind, counts[rank]), rank, size, uneven)

    stream = begin(0)
    enter(stream, 0)
    whole = train(stream)
    stream.close()
    enter(stream, 1)
    whole += train(stream)

    stream = begin(0)
    enter(stream, 0)
    rows = train(stream, cut)
    state = save(stream)
    stream = begin(50)
    enter(stream, 0, state)
    assert stream.position == cut
    rows += train(stream)
    stream.close()
    enter(stream, 1)
    rows += train(stream)
    return whole, rows


@pytest.mark.parametrize("kind", ["iterable", "collection"])
@pytest.mark.parametrize("uneven", ["stop_all", "cycle", "zero_weight"])
@pytest.mark.parametrize("cut", [0, 3, 5])
def test_a_run_goes_on_exactly_where_processes_read_data_of_their_own(kind: str, uneven: str, cut: int) -> None:
    for whole, rows in run_ranks(stopped_and_whole, 2, kind, uneven, cut):
        assert rows == whole


# --- evaluation ------------------------------------------------------------------------------------------------------


def evaluate(rank: int, size: int, count: int, workers: int) -> Any:
    seed(rank)
    options = {"num_workers": workers, "persistent_workers": workers > 0}
    loader = shard_eval(
        DataLoader(Numbers(count), batch_size=3, shuffle=True, **options), Shard(rank, size), share=share
    )
    passes = [in_loader_order(loader, gather([plain(batch) for batch in loader])) for _ in range(2)]
    loader.shut_down()
    return passes


@pytest.mark.parametrize(("count", "workers"), [(16, 0), (1, 0), (7, 1)])
def test_evaluation_reads_every_sample_once_in_the_order_of_one_process(count: int, workers: int) -> None:
    results = run_ranks(evaluate, 3, count, workers)
    seed()
    loader = DataLoader(Numbers(count), batch_size=3, shuffle=True)
    whole = [[plain(batch) for batch in loader] for _ in range(2)]
    for passes in results:
        for number in range(2):
            assert sorted(index for batch in passes[number] for index in batch) == list(range(count))
        if not workers:
            assert passes == whole


class Bag:
    """Samples in an object that does not tell their number."""

    def __init__(self, samples: list[Any]) -> None:
        self.samples = samples

    def to(self, device: Any, **options: Any) -> Bag:
        return self

    def mean(self) -> float:
        return sum(map(float, self.samples)) / len(self.samples)


def weigh(rank: int, size: int, kind: str) -> dict[str, float]:
    """Return the means over an epoch of numbers that are logged as means over batches."""

    class Mean(lw.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Linear(1, 1)

        def training_step(self, batch: Bag, batch_idx: int) -> Any:
            self.log("training", batch.mean(), on_step=False, on_epoch=True)
            return self.net(torch.ones(1)).sum()

        def validation_step(self, batch: Bag, batch_idx: int) -> None:
            self.log("validation", batch.mean())

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    numbers = [*range(13)]
    options: dict[str, Any] = {"batch_size": 2, "shuffle": True}
    if kind == "workers":
        options.update(num_workers=1, persistent_workers=True)
    if kind == "distributed sampler":
        options = {"batch_size": 3, "sampler": DistributedSampler(numbers, size, rank, shuffle=False)}  # type: ignore[arg-type]
    if kind == "buckets":
        options = {"batch_sampler": [[0], [1, 2, 3, 4], [5, 6], [7, 8, 9, 10], [11], [12]]}

    def loader() -> DataLoader[Any]:
        return DataLoader(numbers, collate_fn=Bag, **options)  # type: ignore[arg-type]

    trainer = lw.Trainer(
        accelerator="cpu", devices=size, strategy=lw.strategies.DDPStrategy(uneven="zero_weight"), max_epochs=1,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Mean(), loader(), loader())
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def weigh_all(rank: int, size: int) -> dict[str, dict[str, float]]:
    return {kind: weigh(rank, size, kind) for kind in ("shuffled", "workers", "distributed sampler", "buckets")}


def test_means_of_ranks_are_exactly_those_of_the_samples() -> None:
    exact = {"training": 6.0, "validation": 6.0}
    padded = dict.fromkeys(exact, 78 / 14)  # torch's sampler repeats the first sample
    expected = {"shuffled": exact, "workers": exact, "buckets": exact}
    for found in run_ranks(weigh_all, 2, connect=False):
        sampled = found.pop("distributed sampler")
        assert found == expected
        assert sampled == pytest.approx(padded, rel=1e-15)  # a mean over three is rounded


def resume_each(rank: int, size: int, folder: Path, names: list[str]) -> None:
    for name in names:
        (folder / name).mkdir(exist_ok=True)
        check_resume(name, 0, folder / name, 2, max_epochs=2, devices=size, strategy="ddp")


def test_every_kind_of_data_goes_on_where_it_was_on_two_ranks(tmp_path: Path) -> None:
    names = ["weighted", "prebatched", "stream", "saved_stream", "own_state", "nested", "sequential"]
    run_ranks(resume_each, 2, tmp_path, names, connect=False)
