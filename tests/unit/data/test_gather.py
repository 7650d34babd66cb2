"""Batches of tensors in memory: the same bits, order and random numbers as torch's loop, and its errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Subset, TensorDataset, random_split

import loopwright as lw
from loopwright.data import BatchStream, gather
from loopwright.data.distributed.evaluation import shard_eval
from loopwright.data.distributed.shard import Shard
from loopwright.data.gather import GatherDataset, gathering, gathering_parts, pinned_parts


def tensors() -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    return (
        torch.randn(23, 3, 4),
        torch.randint(0, 9, (23,)),
        torch.randn(23, 2).to(torch.bfloat16),
        torch.rand(23) > 0.5,
        torch.empty(23, 0),
        torch.randn(23, 2, dtype=torch.complex64),
    )


def data() -> TensorDataset:
    return TensorDataset(*tensors())


def split() -> Subset[Any]:
    return random_split(data(), [15, 8], generator=torch.Generator().manual_seed(1))[0]


@pytest.fixture
def collations(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Batches that were collated sample by sample."""
    made: list[object] = []
    original = GatherDataset._collated

    def collated(self: GatherDataset, indices: Any) -> Any:
        made.append(indices)
        return original(self, indices)

    monkeypatch.setattr(GatherDataset, "_collated", collated)
    return made


def is_same(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor):
        return (
            type(first) is type(second)
            and first.dtype == second.dtype
            and first.stride() == second.stride()
            and first.requires_grad == second.requires_grad
            and torch.equal(first, second)
        )
    return type(first) is type(second) and len(first) == len(second) and all(map(is_same, first, second))


def read(loader: Any) -> tuple[list[Any], Tensor]:
    torch.manual_seed(5)
    return list(loader), torch.get_rng_state()


MADE: dict[str, Callable[[], DataLoader[Any]]] = {
    "in order": lambda: DataLoader(data(), batch_size=4),
    "shuffled": lambda: DataLoader(data(), batch_size=4, shuffle=True, drop_last=True),
    "own generator": lambda: DataLoader(data(), 5, shuffle=True, generator=torch.Generator().manual_seed(3)),
    "subset": lambda: DataLoader(split(), batch_size=4, shuffle=True),
    "subset of a subset": lambda: DataLoader(Subset(split(), range(1, 14, 2)), batch_size=3),
    "batch sampler": lambda: DataLoader(data(), batch_sampler=[[3, 1, 3], [22], [0, 5]]),
}


@pytest.mark.parametrize("made", MADE.values(), ids=MADE)
def test_batches_and_draws_are_those_of_torch(made: Callable[[], Any], collations: list[object]) -> None:
    (expected, rng), (found, rng_found) = read(made()), read(gathering(made()))
    assert is_same(expected, found)
    assert torch.equal(rng, rng_found)
    assert not collations


class Own(TensorDataset):
    """Augments."""

    def __getitem__(self, index: Any) -> Any:
        return tuple(2 * tensor for tensor in super().__getitem__(index))


def replaced() -> TensorDataset:
    dataset = data()
    dataset.__getitem__ = lambda index: None  # type: ignore[method-assign]
    return dataset


NOT_GATHERED: dict[str, Callable[[], DataLoader[Any]]] = {
    "own __getitem__": lambda: DataLoader(Own(*tensors()), batch_size=4),
    "below a subset": lambda: DataLoader(Subset(Own(*tensors()), [1, 2, 3]), batch_size=2),
    "collate_fn": lambda: DataLoader(data(), batch_size=4, collate_fn=lambda samples: samples),
    "batch_size=None": lambda: DataLoader(data(), batch_size=None),
    "workers": lambda: DataLoader(data(), batch_size=4, num_workers=1),
    "replaced": lambda: DataLoader(replaced(), batch_size=4),
}


@pytest.mark.parametrize("made", NOT_GATHERED.values(), ids=NOT_GATHERED)
def test_what_was_overridden_is_left_alone(made: Callable[[], Any]) -> None:
    loader = made()
    assert gathering(loader) is loader
    assert not gathering_parts(loader)


def test_a_loader_with_an_iteration_of_its_own_is_left_alone() -> None:
    class Twice(DataLoader[Any]):
        def __iter__(self) -> Any:
            yield from super().__iter__()
            yield from super().__iter__()

    loader = Twice(data(), batch_size=4)
    assert gathering(loader) is loader


COLLATED: dict[str, Callable[[], DataLoader[Any]]] = {
    "channels last": lambda: DataLoader(
        TensorDataset(torch.randn(9, 3, 4, 4).to(memory_format=torch.channels_last)), 4
    ),
    "transposed": lambda: DataLoader(TensorDataset(torch.randn(3, 9).T), 4),
    "with a gradient": lambda: DataLoader(TensorDataset(torch.randn(9, 2, requires_grad=True)), 4),
    "negative indices": lambda: DataLoader(data(), batch_sampler=[[-1, 2]]),
    "indices in tensors": lambda: DataLoader(data(), batch_sampler=[[torch.tensor(3), torch.tensor(1)]]),
}


@pytest.mark.parametrize("made", COLLATED.values(), ids=COLLATED)
def test_what_cannot_be_gathered_is_collated(made: Callable[[], Any], collations: list[object]) -> None:
    torch.manual_seed(2)
    expected = list(made())
    torch.manual_seed(2)
    assert is_same(expected, list(gathering(made())))
    assert collations


def test_an_index_beyond_the_end_is_torchs_own_error() -> None:
    with pytest.raises(IndexError, match="23 is out of bounds"):
        list(gathering(DataLoader(data(), batch_sampler=[[23]])))


def test_changed_tensors_are_seen() -> None:
    loader = DataLoader(dataset := data(), batch_size=23)
    fast = gathering(loader)
    next(iter(fast))
    dataset.tensors[0].add_(1)
    assert is_same(next(iter(loader)), next(iter(fast)))
    dataset.tensors = (torch.arange(23),)
    assert is_same(next(iter(loader)), next(iter(fast)))


def test_training_reads_so_and_resumes_exactly(collations: list[object]) -> None:
    def open_stream() -> BatchStream:
        return BatchStream(DataLoader(data(), batch_size=4, shuffle=True))

    torch.manual_seed(5)
    expected = list(DataLoader(data(), batch_size=4, shuffle=True))
    torch.manual_seed(5)
    stream = open_stream()
    stream.open(0)
    found = [stream.next_batch() for _ in range(2)]
    state = stream.state_dict()
    again = open_stream()
    again.load_state_dict(state)
    again.reopen()
    while again.has_next():
        found.append(again.next_batch())
    assert is_same(expected, found)
    assert not collations


def test_evaluation_reads_so(collations: list[object]) -> None:
    class Sum(lw.Module):
        def __init__(self) -> None:
            super().__init__()
            self.total = 0

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.total += int(batch[1].sum())

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lw.Trainer(accelerator="cpu", devices=1, **quiet)
    trainer.validate(module := Sum(), DataLoader(dataset := data(), batch_size=4), verbose=False)
    assert module.total == int(dataset.tensors[1].sum())
    shared = shard_eval(loader := DataLoader(dataset, batch_size=4), Shard(rank=1, size=2))
    assert is_same(list(loader)[1::2], list(shared))
    assert not collations


def test_training_for_a_cuda_device_gathers_into_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[int, ...]] = []

    def empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        made.append(shape)
        return torch.empty(shape, dtype=dtype)

    monkeypatch.setattr(gather, "_empty_pinned", empty)
    stream = BatchStream([DataLoader(data(), batch_size=4)])
    stream.pin_batches()
    stream.open(0)
    assert is_same(next(iter(DataLoader(data(), batch_size=4))), stream.next_batch()[0])
    assert made[:2] == [(4, 3, 4), (4,)]


def test_batches_of_workers_are_pinned_by_the_loaders_thread() -> None:
    loader = DataLoader(data(), batch_size=4, num_workers=1)
    assert pinned_parts(loader) == {"pin_memory": True}
    assert not pinned_parts(DataLoader(data(), batch_size=4))
    stream = BatchStream(loader)
    stream.pin_batches()
    assert stream._source._copy.pin_memory  # type: ignore[attr-defined]
    assert not loader.pin_memory
