"""Each pass over an evaluation loader with persistent workers is as if it were the first."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from loopwright.data.persistent_workers import PersistentWorkersLoader, with_persistent_workers


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
