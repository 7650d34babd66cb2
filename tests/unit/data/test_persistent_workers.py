"""Each pass over an evaluation loader with persistent workers is as if it were the first."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

from loopwright.data.distributed.evaluation import shard_eval
from loopwright.data.distributed.shard import Shard
from loopwright.data.persistent_workers import PersistentWorkersLoader, with_persistent_workers
from loopwright.data.stream import BatchStream


class Noise(Dataset[Tensor]):
    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> Tensor:
        return index + torch.rand(())


class NoiseStream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        for _ in range(3):
            yield torch.rand(())


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def passes(loader: Any, seeds: list[int]) -> list[list[float]]:
    """Return what each pass gives, beginning with these seeds."""
    found = []
    for seed in seeds:
        torch.manual_seed(seed)
        found.append([value for batch in loader for value in batch.reshape(-1).tolist()])
    return found


def noisy(**kwargs: Any) -> DataLoader[Tensor]:
    return DataLoader(Noise(), batch_size=2, num_workers=1, persistent_workers=True, **kwargs)


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_pass_depends_on_the_generators_at_its_beginning_only(shuffle: bool) -> None:
    living, new = with_persistent_workers(noisy(shuffle=shuffle)), with_persistent_workers(noisy(shuffle=shuffle))
    first, second, again = passes(living, [1, 2, 1])
    assert first == again
    assert first != second
    assert passes(new, [2]) == [second]
    assert sorted(int(value) for value in first) == [0, 1, 2, 3, 4]
    assert len(living) == 3
    for loader in (living, new):
        loader.shut_down()


class Scaled(Dataset[Tensor]):
    """Its samples are `transform.factor`, and "scale" of a list."""

    def __init__(self) -> None:
        self.transform, self.scales, self.epoch = SimpleNamespace(factor=1.0), [1.0, 2.0], 0
        self.samples = torch.zeros(4)

    def __len__(self) -> int:
        return len(self.samples)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([self.transform.factor, self.scales[0], self.epoch, os.getpid()])


@pytest.mark.parametrize("kind", ["training", "evaluation", "of two ranks"])
def test_attributes_that_change_between_passes_reach_workers(kind: str) -> None:
    data = Scaled()
    loader = DataLoader(Subset(data, range(4)), batch_size=2, num_workers=1, persistent_workers=True, shuffle=True)
    stream = BatchStream(loader)
    evaluation: Any = with_persistent_workers(loader) if kind == "evaluation" else shard_eval(loader, Shard(0, 2))

    def read(number: int) -> list[float]:
        torch.manual_seed(number)
        if kind == "training":
            stream.open(number)
            batch = stream.next_batch()
            stream.close()
        else:
            batch = next(iter(evaluation))
        return [float(value) for value in batch[0]]

    first, second = read(0), read(1)
    assert first == second  # the same worker
    data.transform.factor = 2.0
    third = read(2)
    assert (third[:2], third[3] == first[3]) == ([2.0, 1.0], False)
    data.scales[0] = 5.0
    assert read(3)[:2] == [2.0, 5.0]
    assert read(4) == read(5)
    stream.shut_down()
    evaluation.shut_down()


def test_new_workers_draw_what_the_former_ones_would_have_drawn_and_set_epoch_starts_none() -> None:
    def run(*, changes: bool) -> tuple[list[Any], set[int], Tensor]:
        class Numbers(Scaled):
            def __getitem__(self, index: int) -> Tensor:
                return torch.tensor([index, self.epoch, float(torch.rand(())), os.getpid()], dtype=torch.float64)

        torch.manual_seed(0)
        data = Numbers()
        stream = BatchStream(DataLoader(data, batch_size=2, num_workers=1, persistent_workers=True, shuffle=True))
        found, workers = [], set()
        for epoch in range(3):
            stream.open(epoch)
            while stream.has_next():
                batch = stream.next_batch()
                found.append(batch[:, :3].tolist())
                workers |= {int(one) for one in batch[:, 3]}
            stream.close()
            data.scales[0] += changes
        stream.shut_down()
        return found, workers, torch.rand(())

    plain, changed = run(changes=False), run(changes=True)
    assert (plain[0], plain[2]) == (changed[0], changed[2])
    assert (len(plain[1]), len(changed[1])) == (1, 3)


def test_an_iterable_data_set_gets_new_workers_for_each_pass() -> None:
    loader = with_persistent_workers(DataLoader(NoiseStream(), num_workers=1, persistent_workers=True))
    first, again = passes(loader, [1, 1])
    assert first == again


def test_other_loaders_stay_as_they_are() -> None:
    plain, batches = DataLoader(Noise()), [torch.zeros(1)]
    assert with_persistent_workers(plain) is plain
    assert with_persistent_workers(batches) is batches


def test_the_users_loader_is_left_alone() -> None:
    loader = noisy()
    wrapped = with_persistent_workers(loader)
    assert isinstance(wrapped, PersistentWorkersLoader)
    passes(wrapped, [1])
    assert loader._iterator is None
    assert isinstance(loader.dataset, Noise)
    wrapped.shut_down()
