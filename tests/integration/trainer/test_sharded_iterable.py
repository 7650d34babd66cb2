"""Training on iterable data that is split over ranks equals training in one process, and resumes."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch.utils.data import DataLoader, IterableDataset

import loopwright as lw

COUNT, BATCH = 37, 3


class Stream(IterableDataset[Any]):
    """Drawn from the global generators; the first column is the number of the sample."""

    def __init__(self, offset: int = 0) -> None:
        self.offset = offset

    def __iter__(self) -> Iterator[Any]:
        order = list(range(COUNT))
        random.shuffle(order)
        for index in order:
            yield torch.cat([torch.tensor([float(index + self.offset)]), torch.randn(4)]).double()


class Linear(lw.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = torch.nn.Linear(4, 1).double()
        self.seen: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen += batch[:, 0].long().tolist()
        loss = (self.net(batch[:, 1:]) - batch[:, 1:].sum(1, keepdim=True)).square()
        return lw.Loss(loss.sum(), len(batch))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("count", torch.tensor(float(len(batch))), reduce_fx="sum")

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def train(rank: int, size: int, workers: int, path: str = "", save_at: int = 0, **options: Any) -> dict[str, Any]:
    plan: dict[str, Any] = {
        "logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False,
        "accelerator": "cpu", "max_epochs": 2, "devices": size, "num_sanity_val_steps": 0,
    }  # fmt: skip
    if size > 1:
        plan["strategy"] = lw.strategies.DDPStrategy(uneven="zero_weight")
    lw.seed_everything(7, verbose=False)
    module = Linear()
    trainer = lw.Trainer(**plan, **options, max_steps=save_at or -1)
    train_loader = DataLoader(lw.ShardedIterable(Stream()), batch_size=BATCH, num_workers=workers)
    validation = DataLoader(lw.ShardedIterable(Stream()), batch_size=BATCH)
    trainer.fit(module, train_loader, validation, ckpt_path=path if path and not save_at else None)
    if save_at:
        trainer.save_checkpoint(path)
    seen = trainer.strategy.gather_objects(module.seen) if size > 1 else [module.seen]
    return {
        "seen": seen,
        "weights": [value.detach().clone() for value in module.parameters()],
        "count": float(trainer.callback_metrics.get("count", 0)),
    }


def test_two_ranks_train_as_one_process_with_accumulation() -> None:
    alone = train(0, 1, 0, accumulate_grad_batches=2)
    for workers in (0, 1):
        first, second = run_ranks(train, 2, workers, connect=False)
        for ours, theirs, reference in zip(first["weights"], second["weights"], alone["weights"], strict=True):
            assert torch.equal(ours, theirs)
            torch.testing.assert_close(ours, reference, rtol=1e-12, atol=0)  # sums in another order, float64
        assert sorted(first["seen"][0] + first["seen"][1]) == sorted([*range(COUNT)] * 2)
        assert first["count"] == alone["count"] == COUNT


def test_a_run_resumes_in_the_middle_of_an_epoch_on_any_number_of_ranks(tmp_path: Path) -> None:
    path = str(tmp_path / "middle.ckpt")
    whole = run_ranks(train, 2, 1, connect=False)[0]
    begun = run_ranks(train, 2, 1, path, 4, connect=False)[0]  # 4 steps of 2 x 3 samples
    for size in (2, 3):
        rest = run_ranks(train, size, 1, path, connect=False)[0]
        if size == 2:
            assert all(torch.equal(a, b) for a, b in zip(rest["weights"], whole["weights"], strict=True))
            assert [a + b for a, b in zip(begun["seen"], rest["seen"], strict=True)] == whole["seen"]
        read = [index for one in (*begun["seen"], *rest["seen"]) for index in one]
        assert sorted(read) == sorted([*range(COUNT)] * 2), size


def other_data(rank: int, size: int) -> None:
    plan = dict.fromkeys(["logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"], False)
    trainer = lw.Trainer(accelerator="cpu", devices=size, strategy="ddp", max_epochs=1, limit_val_batches=0, **plan)
    with pytest.raises(lw.DataError, match="same samples on every rank"):
        trainer.fit(Linear(), DataLoader(lw.ShardedIterable(Stream(offset=rank)), batch_size=BATCH))


def test_a_data_set_that_differs_by_rank_is_refused() -> None:
    run_ranks(other_data, 2, connect=False)


def unsplit(rank: int, size: int) -> list[str]:
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("loopwright").addHandler(handler)
    plan = dict.fromkeys(["logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"], False)
    trainer = lw.Trainer(accelerator="cpu", devices=size, strategy="ddp", max_steps=1, limit_val_batches=0, **plan)
    data = [torch.full((5,), float(index)).double() for index in range(12)]
    trainer.fit(Linear(), DataLoader(Plain(data), batch_size=BATCH))
    return [message for message in messages if "same first batch" in message]


class Plain(IterableDataset[Any]):
    def __init__(self, data: list[Any]) -> None:
        self.data = data

    def __iter__(self) -> Iterator[Any]:
        return iter(self.data)


def test_the_warning_about_unsplit_data_says_how_to_split_it() -> None:
    said = run_ranks(unsplit, 2, connect=False)
    assert "DataLoader(lw.ShardedIterable(dataset), ...)" in said[0][0]
