"""Iterable data sets split over ranks and workers: each sample once, whatever their numbers, and exact resumes."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kept import keep
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import loopwright as lw
from loopwright.data import NO_BATCH, BatchStream, Shard, capture_rng, in_loader_order, shard_eval


class Shuffled(IterableDataset[Any]):
    """Draws its order, and something for each sample, from the global generators; splits itself over workers."""

    def __init__(self, count: int = 23, draw: Any = None) -> None:
        self.count = count
        self.epoch = 0
        self.draw = draw

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        order = list(range(self.count))
        random.shuffle(order)
        for index in order:
            if info is None or index % info.num_workers == info.id:
                drawn = self.draw() if self.draw is not None else int(torch.randint(1000, ()))
                yield torch.tensor([index, self.epoch, drawn])


def streams_of(
    size: int, workers: int, uneven: str = "stop_all", data: Any = None, **options: Any
) -> list[BatchStream]:
    def loader() -> Any:
        return DataLoader(lw.ShardedIterable(data or Shuffled()), batch_size=3, num_workers=workers, **options)

    return [BatchStream(loader(), shard=Shard(rank, size, uneven)) for rank in range(size)]


def read(streams: list[BatchStream], most: int | None = None, state: Any = None) -> tuple[list[Any], Any]:
    """Return the batches of all ranks in the order of the loader, and the position after them."""
    torch.manual_seed(5)
    shared = capture_rng()
    for rank, stream in enumerate(streams):
        torch.manual_seed(rank)  # ranks draw for themselves what is not the data's
        if state is None:
            stream.open(1, shared)
        else:
            stream.load_state_dict(state)
            stream.reopen()
    rows: list[Any] = []
    while most is None or len(rows) < most:
        left = {stream.remaining(2) for stream in streams}
        assert len(left) == 1
        if left == {0}:
            break
        rows.append([stream.next_batch() for stream in streams])
        torch.rand(1)
    assert len({stream.describe_order() for stream in streams}) == 1
    states = [stream.state_dict() for stream in streams]
    for stream in streams:
        stream.shut_down()
    return [batch.tolist() for row in rows for batch in row if batch is not NO_BATCH], states[0]


@pytest.mark.parametrize(
    ("workers", "drop_last"), keep(itertools.product([0, 1, 2], [False, True]), (0, False), (0, True), (1, True))
)
def test_each_batch_is_read_by_one_rank(workers: int, drop_last: bool) -> None:
    alone, _ = read(streams_of(1, 0, drop_last=drop_last))
    assert len(alone) == (7 if drop_last else 8)
    assert {epoch for batch in alone for _, epoch, _ in batch} == {1}
    for size in (1, 2, 3):
        for uneven in ("stop_all", "cycle", "zero_weight") if size > 1 else ("stop_all",):
            batches, _ = read(streams_of(size, workers, uneven, drop_last=drop_last))
            expected = {
                "stop_all": alone[: len(alone) // size * size],
                "cycle": alone + alone[: -len(alone) % size],
                "zero_weight": alone,
            }
            assert batches == expected[uneven], (size, uneven)


@pytest.mark.parametrize("workers", keep([0, 2], 0))
def test_a_resume_continues_after_what_was_read_on_any_number_of_ranks(workers: int) -> None:
    alone, _ = read(streams_of(1, 0))
    for size in (1, 2, 3):
        first, state = read(streams_of(size, workers, "zero_weight"), most=2)
        for other in (1, 2, 3):
            rest, _ = read(streams_of(other, workers, "zero_weight"), state=state)
            assert first + rest == alone, (size, other)


def test_another_batch_size_goes_on_at_the_same_sample() -> None:
    first, state = read(streams_of(2, 0, "zero_weight"), most=2)
    bigger = BatchStream(DataLoader(lw.ShardedIterable(Shuffled()), batch_size=5))
    rest, _ = read([bigger], state=state)
    assert sorted(index for batch in first + rest for index, *_ in batch) == list(range(23))
    assert [len(batch) for batch in rest] == [5, 5, 1]


def test_the_end_of_an_epoch_resumes_with_the_next() -> None:
    streams = streams_of(2, 0)
    _, state = read(streams)
    again = streams_of(2, 0)
    for stream in again:
        stream.load_state_dict(state)
    rows, _ = read(again)
    assert rows == read(streams_of(2, 0))[0]


def test_limits_count_batches_of_one_rank() -> None:
    streams = [
        BatchStream(DataLoader(lw.ShardedIterable(Shuffled()), batch_size=3), 2, shard=Shard(rank, 2))
        for rank in (0, 1)
    ]
    rows, state = read(streams, most=1)
    rest, _ = read(
        [BatchStream(DataLoader(lw.ShardedIterable(Shuffled()), batch_size=3), 4)], state=state
    )  # 2 x 2 batches of all
    assert rows + rest == read(streams_of(1, 0))[0][:4]


class WithGenerator(Shuffled):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def __iter__(self) -> Iterator[Any]:
        yield from (torch.tensor([i]) for i in torch.randperm(self.count, generator=self.generator).tolist())


def test_generators_in_attributes_continue_from_epoch_to_epoch_and_are_saved() -> None:
    data = WithGenerator()
    streams = streams_of(1, 0, data=data)
    first, _ = read(streams)
    second, _ = read(streams)
    assert first != second
    torch.manual_seed(5)
    streams = streams_of(1, 0, data=WithGenerator())
    read(streams)
    part, state = read(streams, most=3)
    rest, _ = read(streams_of(1, 0, data=WithGenerator()), state=state)
    assert part + rest == second


def mixed(samples: list[Any]) -> Any:
    return torch.stack(samples) + 10_000 * int(torch.randint(5, ()))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_collate_function_that_draws_does_not_shift_the_data(workers: int) -> None:
    plain, _ = read(streams_of(2, workers))
    shifted, _ = read(streams_of(2, workers, collate_fn=mixed))
    assert [[[value % 10_000 for value in sample] for sample in batch] for batch in shifted] == plain
    part, state = read(streams_of(2, workers, collate_fn=mixed), most=2)
    rest, _ = read(streams_of(2, workers, collate_fn=mixed), state=state)
    assert part + rest == shifted


def from_numpy() -> int:
    return int(np.random.randint(1000))


class Late(Shuffled):
    def __iter__(self) -> Iterator[Any]:
        for index in range(self.count):
            yield torch.tensor([index, from_numpy() if index > 12 else 0])


def test_numpy_is_followed_or_refused() -> None:
    assert (
        read(streams_of(2, 0, data=Shuffled(draw=from_numpy)))[0]
        == read(streams_of(2, 2, data=Shuffled(draw=from_numpy)))[0]
    )
    with pytest.raises(lw.DataError, match="NumPy's global generator"):
        read(streams_of(2, 0, data=Late()))


def test_evaluation_reads_each_sample_once_and_knows_the_order() -> None:
    loader = DataLoader(lw.ShardedIterable(Shuffled()), batch_size=3)
    shares = [shard_eval(loader, Shard(rank, 3)) for rank in range(3)]
    parts = [[batch.tolist() for batch in share] for share in shares]
    assert list(map(len, parts)) == [3, 3, 2]
    whole = in_loader_order(shares[0], parts)
    assert sorted(index for batch in whole for index, *_ in batch) == list(range(23))
    assert [[batch.tolist() for batch in share] for share in shares] == parts  # in each pass


def test_a_loop_of_ones_own_gives_every_nth_sample() -> None:
    data = lw.ShardedIterable(range(10))
    data.set_shard(1, 3)
    assert list(data) == [1, 4, 7]
    data.set_shard(0, 1)
    both = [batch.tolist() for batch in DataLoader(data, batch_size=2, num_workers=2)]
    assert sorted(chain.from_iterable(both)) == list(range(10))


def test_what_cannot_be_iterated_again_is_refused() -> None:
    for wrong in (iter([1]), (n for n in range(3)), 3):
        with pytest.raises(lw.ConfigError, match="again and again"):
            lw.ShardedIterable(wrong)


# --- data sets that split themselves ---------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata 0.11 calls it
def test_torchdata_reads_its_share_and_resumes() -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader")

    def make(rank: int, workers: int) -> BatchStream:
        data = lw.ShardedIterable(list(range(22)))
        return BatchStream(stateful.StatefulDataLoader(data, batch_size=2, num_workers=workers), shard=Shard(rank, 2))

    for workers in (0, 2):
        whole: list[int] = []
        for rank in (0, 1):
            stream = make(rank, workers)
            stream.open(0)
            first = [stream.next_batch().tolist() for _ in range(3)]
            state = stream.state_dict()
            stream.shut_down()
            other = make(rank, workers)
            other.load_state_dict(state)
            other.reopen()
            rest = []
            while other.has_next():
                rest.append(other.next_batch().tolist())
            other.shut_down()
            whole += chain.from_iterable(first + rest)
        assert sorted(whole) == list(range(22)), workers


def batches_of(loader: Any) -> Iterator[Any]:
    stream = BatchStream(loader, shard=Shard(1, 2))
    stream.open(0)
    while stream.has_next():
        yield stream.next_batch()


def test_a_graph_of_torchdata_nodes_can_begin_with_it() -> None:
    nodes = pytest.importorskip("torchdata.nodes")
    data = lw.ShardedIterable(list(range(9)))
    data.set_shard(1, 2)
    graph = nodes.Loader(nodes.Batcher(nodes.IterableWrapper(data), batch_size=2, drop_last=False))
    assert list(batches_of(graph)) == [[1, 3], [5, 7]]


@pytest.mark.slow
def test_hugging_face_streams_are_sharded_or_split_by_node(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    distributed = pytest.importorskip("datasets.distributed")
    files = []
    for part in range(2):
        files.append(str(tmp_path / f"{part}.jsonl"))
        Path(files[-1]).write_text("".join(json.dumps({"n": 10 * part + i}) + "\n" for i in range(10)))

    def open_stream() -> Any:
        cache = str(tmp_path / "cache")
        stream = datasets.load_dataset("json", data_files=files, streaming=True, split="train", cache_dir=cache)
        return stream.shuffle(seed=1, buffer_size=7).with_format("torch")

    def numbers(rank: int, split: Any, workers: int) -> list[int]:
        loader = DataLoader(lw.ShardedIterable(open_stream(), split=split), batch_size=2, num_workers=workers)
        stream = BatchStream(loader, shard=Shard(rank, 2))
        stream.open(0)
        found: list[int] = []
        while stream.has_next():
            found += stream.next_batch()["n"].tolist()
        stream.shut_down()
        return found

    for split, workers in ((None, 0), (None, 2), (distributed.split_dataset_by_node, 0)):
        parts = [numbers(rank, split, workers) for rank in (0, 1)]
        assert sorted(parts[0] + parts[1]) == list(range(20)), (split, workers)
        assert len(parts[0]) == len(parts[1]) == 10
