"""Training data of every kind, and a check that a resumed run reads what the whole run read.

Used by unit/trainer/session/test_loaders_resume.py and integration/trainer/test_data.py.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
)
from torchdata.stateful_dataloader import StatefulDataLoader
from toys import assert_same, quiet

import loopwright as lw

Make = Callable[[int], Any]


# --- data ----------------------------------------------------------------------------------------------------------


def by_rank() -> int:
    """Return a number that tells the data of ranks apart."""
    return 1000 * torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def sample(index: int) -> Tensor:
    """Return (index, augmented value)."""
    return torch.tensor([float(index), index / 10 + float(torch.rand(())) + random.random()])


class Samples(Dataset[Tensor]):
    def __init__(self, count: int = 14) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: Any) -> Tensor:
        if isinstance(index, list):
            return torch.stack([sample(i) for i in index])
        return sample(index)


class Plain(Samples):
    """Draws nothing: torchdata does not save the random numbers of its workers."""

    def __getitem__(self, index: Any) -> Tensor:
        return torch.tensor([float(index), 1.0])


class Stream(IterableDataset[Tensor]):
    """A stream without a length, whose order is drawn; split over workers."""

    def __iter__(self) -> Iterator[Tensor]:
        info = torch.utils.data.get_worker_info()
        first, step = (info.id, info.num_workers) if info is not None else (0, 1)
        for _ in range(first, 14, step):
            yield sample(random.randrange(100) + by_rank())


class SavedStream(IterableDataset[Tensor]):
    """A stream that goes on where it was and can save itself; an epoch ends after 13 samples."""

    def __init__(self) -> None:
        self.index = 0
        self.generator = random.Random(3)

    def __iter__(self) -> Iterator[Tensor]:
        while True:
            self.index += 1
            yield torch.tensor([float(self.index + by_rank()), self.generator.random()])
            if self.index % 13 == 0:
                return

    def state_dict(self) -> dict[str, Any]:
        version, numbers, rest = self.generator.getstate()
        return {"index": self.index, "random": [version, list(numbers), rest]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.index = state["index"]
        version, numbers, rest = state["random"]
        self.generator.setstate((version, tuple(numbers), rest))


class PlacedStream(IterableDataset[Tensor]):
    """A stream over a list that begins where its loaded state says, once."""

    def __init__(self) -> None:
        self.place = self.start = 0

    def __iter__(self) -> Iterator[Tensor]:
        self.place, self.start = self.start, 0
        while self.place < 13:
            self.place += 1
            yield torch.tensor([float(self.place), 1.0])

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start = self.place = state["place"]


class Pairs(Sampler[list[int]]):
    """Batches of one, two and three samples in a drawn order."""

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(14).tolist()
        while order:
            size = 1 + len(order) % 3
            yield order[:size]
            order = order[size:]


class Tokens:
    """A loader of the user's own, with a position."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Iterator[Tensor]:
        while self.position < 7:
            self.position += 1
            yield torch.stack([sample(self.position + by_rank()), sample(-self.position)])
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


def shuffled(workers: int, count: int = 14, batch_size: int = 2, **kwargs: Any) -> DataLoader[Any]:
    return DataLoader(Samples(count), batch_size, shuffle=True, num_workers=workers, **kwargs)


def combined(mode: str) -> Make:
    def make(workers: int) -> Any:
        nested = {"a": shuffled(workers, 10), "b": [shuffled(0, 12, 4), DataLoader(Stream(), 3, num_workers=workers)]}
        if mode == "sequential":
            nested = {"a": shuffled(workers, 6), "b": [shuffled(0, 8, 4), DataLoader(Stream(), 5)]}
        return lw.CombinedLoader(nested, mode)

    return make


KINDS: dict[str, Make] = {
    "shuffled": shuffled,
    "persistent": lambda workers: shuffled(workers, persistent_workers=workers > 0),
    "weighted": lambda workers: DataLoader(
        Samples(), 2, sampler=WeightedRandomSampler(range(1, 15), 14), num_workers=workers
    ),
    "batch_sampler": lambda workers: DataLoader(Samples(), batch_sampler=Pairs(), num_workers=workers),
    "prebatched": lambda workers: DataLoader(
        Samples(), batch_size=None, sampler=BatchSampler(RandomSampler(range(14)), 3, False), num_workers=workers
    ),
    "stream": lambda workers: DataLoader(Stream(), 2, num_workers=workers),
    "stream_without_batches": lambda workers: DataLoader(Stream(), None, num_workers=workers),
    "saved_stream": lambda workers: DataLoader(SavedStream(), 2, num_workers=0),
    "placed_stream": lambda workers: DataLoader(PlacedStream(), 2, num_workers=0),
    "torchdata": lambda workers: StatefulDataLoader(
        (Plain if workers else Samples)(), 2, shuffle=True, num_workers=workers
    ),
    "torchdata_stream": lambda workers: StatefulDataLoader(SavedStream(), 2, num_workers=workers),
    "torchdata_placed": lambda workers: StatefulDataLoader(PlacedStream(), 2, num_workers=workers),
    "own_state": lambda workers: Tokens(),
    "nested": lambda workers: [shuffled(workers, 10), {"x": shuffled(0, 6), "y": Tokens()}],
    **{mode: combined(mode) for mode in ("min_size", "max_size", "max_size_cycle", "sequential")},
}
WITH_WORKERS = [
    "persistent",
    "batch_sampler",
    "prebatched",
    "stream",
    "torchdata",
    "torchdata_stream",
    "torchdata_placed",
    "nested",
    "sequential",
]


# --- training ------------------------------------------------------------------------------------------------------


def tensors(batch: Any) -> list[Tensor]:
    if isinstance(batch, Tensor):
        return [batch]
    values = batch.values() if isinstance(batch, dict) else batch or []
    return [part for value in values if value is not None for part in tensors(value)]


class Reader(lw.Module):
    """Trains on what it gets, draws, and keeps what it got."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        random.seed(5)
        self.layer = nn.Linear(2, 1)
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        parts = [part.reshape(-1, 2) for part in tensors(batch)]
        self.seen.append([part.tolist() for part in parts])
        random.random()
        return (self.layer(torch.cat(parts)) * torch.rand(())).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-4)


class SaveEach(lw.Callback):
    """Saves at each place where a checkpoint may be taken, and how many batches had been read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.places: list[tuple[Path, int]] = []

    def _save(self, trainer: Any, module: Any) -> None:
        path = self.folder / f"{len(self.places)}.ckpt"
        trainer.save_checkpoint(path)
        self.places.append((path, len(module.seen)))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.at_step_boundary:
            self._save(trainer, pl_module)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self._save(trainer, pl_module)


def train(make: Make, workers: int, path: Path | None = None, callbacks: Any = (), **arguments: Any) -> Reader:
    module = Reader()
    trainer = quiet(callbacks=list(callbacks), **{"max_epochs": 3, **arguments})
    trainer.fit(module, make(workers), ckpt_path=path)
    return module


def check_resume(name: str, workers: int, folder: Path, most: int, **arguments: Any) -> None:
    saver = SaveEach(folder)
    reference = train(KINDS[name], workers, callbacks=[saver], **arguments)
    plain = train(KINDS[name], workers, **arguments)
    assert plain.seen == reference.seen  # saving changes nothing
    places = saver.places[:-1]
    spread = sorted({round(i * (len(places) - 1) / (most - 1)) for i in range(most)})
    for path, count in [places[number] for number in spread]:
        resumed = train(KINDS[name], workers, path, **arguments)
        assert resumed.seen == reference.seen[count:], (name, path.name, count)
        assert_same(resumed, reference)
