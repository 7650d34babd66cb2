"""Options of a DataLoader that could make a resume lose samples or repeat them: each is exact."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from kept import keep
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, get_worker_info
from toys import Net, quiet

import loopwright as lw

BATCHES = 7


class Slow(Dataset[Tensor]):
    """Samples of the first worker take long, so that the second one is ahead; each is augmented at random."""

    def __len__(self) -> int:
        return 2 * BATCHES

    def __getitem__(self, index: int) -> Tensor:
        info = get_worker_info()
        if info is not None and info.id == 0:
            sum(range(200_000))
        return torch.tensor([index, random.random(), float(torch.rand(()))])


class SlowStream(IterableDataset[Tensor]):
    """Each worker has samples of its own, and the first one is slow."""

    def __iter__(self) -> Iterator[Tensor]:
        info = get_worker_info()
        number = info.id if info is not None else 0
        for index in range(BATCHES):
            if number == 0:
                sum(range(200_000))
            yield torch.tensor([100 * number + index, random.random(), float(torch.rand(()))])


class Seen(Net):
    """Keeps the samples that it was trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[list[float]] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.seen += batch.tolist()
        return self.net(torch.cat([batch, batch[:, :1]], 1)).mean() * 1e-3

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return batch[:, 0]


def draw_in_worker(worker_id: int) -> None:
    for _ in range(worker_id + 1):
        random.random()
        torch.rand(())


def make(option: str) -> DataLoader[Tensor]:
    workers: dict[str, Any] = {"num_workers": 2}
    if option == "iterable, in_order=False":
        return DataLoader(SlowStream(), batch_size=2, in_order=False, **workers)
    if option == "batch_sampler":
        return DataLoader(Slow(), batch_sampler=BatchSampler(RandomSampler(Slow()), 2, False), **workers)
    options = {
        "in_order=False": {"in_order": False},
        "in_order=False, persistent": {"in_order": False, "persistent_workers": True},
        "prefetch_factor": {"prefetch_factor": 5},
        "persistent_workers": {"persistent_workers": True},
        "worker_init_fn": {"worker_init_fn": draw_in_worker},
        "multiprocessing_context": {"multiprocessing_context": "fork"},
        "timeout": {"timeout": 30},
    }
    return DataLoader(Slow(), batch_size=2, shuffle=True, **workers, **options[option])


OPTIONS = [
    "in_order=False", "in_order=False, persistent", "iterable, in_order=False", "batch_sampler", "prefetch_factor",
    "persistent_workers", "worker_init_fn", "multiprocessing_context", "timeout",
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:DataLoader.in_order=False")
@pytest.mark.parametrize("option", keep(OPTIONS, "in_order=False, persistent", "iterable, in_order=False"))
def test_a_resume_in_mid_epoch_trains_on_the_same_samples(option: str, tmp_path: Path) -> None:
    def fit(steps: int, path: Path | None = None) -> tuple[lw.Trainer, Seen]:
        lw.seed_everything(5, verbose=False)
        module = Seen()
        trainer = quiet(max_steps=steps, max_epochs=2, enable_checkpointing=None, default_root_dir=tmp_path)
        trainer.fit(module, make(option), ckpt_path=path)
        return trainer, module

    whole = fit(12)[1].seen
    trainer, first = fit(4)
    trainer.save_checkpoint(tmp_path / "four.ckpt")
    rest = fit(12, tmp_path / "four.ckpt")[1].seen
    assert first.seen + rest == whole


def test_predictions_come_in_the_order_of_the_data() -> None:
    loader = DataLoader(Slow(), batch_size=2, num_workers=2, in_order=False)
    with pytest.warns(UserWarning, match="is read in order"):
        predicted = quiet().predict(Seen(), loader)
    assert torch.cat(predicted).tolist() == list(range(2 * BATCHES))
