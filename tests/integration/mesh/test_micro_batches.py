"""`Pipeline(micro_batches=)`: batches in parts give the results of one process on entire batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader

import loopwright as lw
from loopwright.checkpoint import storage
from loopwright.strategies import MeshStrategy, Strategy
from loopwright.strategies.mesh.pipeline import Pipeline

# Any in this file: batches, and results that travel between processes.

WIDTH, WORDS = 8, 11


class Net(lw.Module):
    """Nothing in it knows of stages or parts."""

    def __init__(self, form: str = "mean", dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(dropout))
            for _ in range(4)
        )
        self.head = nn.Linear(WIDTH, WORDS)
        self.form = form
        self.seen: list[tuple[int, int]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        ids, targets = batch["ids"], batch["targets"]
        self.seen.append((batch_idx, len(ids)))
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        each = nn.functional.cross_entropy(self.head(x), targets, reduction="none")
        self.log("loss", each.mean(), on_step=True, on_epoch=True)
        self.log("most", each.max().detach(), reduce_fx="max", on_step=True, on_epoch=True)
        if self.form == "sum":
            kept = targets != 3
            return lw.Loss(each[kept].sum(), kept.sum())
        if self.form == "dict":
            return {"loss": each.mean(), "each": each, "ids": ids}
        return each.mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(2)
        self.ids, self.targets = (torch.randint(0, WORDS, (count,), generator=generator) for _ in range(2))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"ids": self.ids[index], "targets": self.targets[index]}


class Seen(lw.Callback):
    """What hooks get."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.steps: list[dict[str, float]] = []
        self.outputs: list[Any] = []
        self.counts = {"start": 0, "before": 0, "after": 0, "end": 0}

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.counts["start"] += 1

    def on_before_backward(self, trainer: Any, module: Any, loss: Tensor) -> None:
        self.counts["before"] += 1

    def on_after_backward(self, trainer: Any, module: Any) -> None:
        self.counts["after"] += 1

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.counts["end"] += 1
        if outputs is not None:
            self.losses.append(float(outputs["loss"]))
            if "ids" in outputs:
                assert torch.equal(outputs["ids"], batch["ids"])
                assert outputs["each"].shape == batch["ids"].shape
            metrics = trainer.callback_metrics
            self.steps.append({name: float(metrics[name]) for name in ("loss_step", "most_step")})


def trainer_of(size: int, strategy: Strategy | str, **arguments: Any) -> lw.Trainer:
    defaults: dict[str, Any] = {
        "accelerator": "cpu", "strategy": strategy, "devices": size, "precision": "64-true", "max_epochs": 1,
        "logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False,
    }  # fmt: skip
    return lw.Trainer(**{**defaults, **arguments})


def fit(
    rank: int, size: int, strategy: Strategy | str, form: str, batch_size: int, count: int, arguments: dict[str, Any]
) -> dict[str, Any]:
    lw.seed_everything(1, verbose=False)
    module, seen = Net(form), Seen()
    trainer = trainer_of(size, strategy, gradient_clip_val=0.3, callbacks=[seen], **arguments)
    trainer.fit(module, DataLoader(Rows(count), batch_size=batch_size))
    weights: dict[str, Tensor] = {}
    for name, value in module.named_parameters():
        weights[name] = cast(Any, value).full_tensor() if hasattr(value, "full_tensor") else value.detach().clone()
    return {
        "weights": weights, "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "losses": seen.losses, "steps": seen.steps, "counts": seen.counts, "seen": module.seen,
        "progress": [trainer.global_step, trainer.progress.total_batches, trainer.progress.samples],
    }  # fmt: skip


def compare(
    size: int, options: Pipeline, *, form: str = "mean", batch_size: int = 8, count: int = 40, replicas: int = 1,
    **arguments: Any,
) -> list[dict[str, Any]]:  # fmt: skip
    mesh = MeshStrategy(pp=2, pipeline=options)
    expected = run_ranks(fit, 1, "auto", form, batch_size, count, arguments, connect=False)[0]
    ranks = run_ranks(fit, size, mesh, form, batch_size // replicas, count, arguments, connect=False)
    found: dict[str, Tensor] = {}
    for one in ranks:
        found.update(one["weights"])
        assert one["progress"] == expected["progress"]
        for name in ("loss_epoch", "most_epoch"):
            assert abs(one["metrics"][name] - expected["metrics"][name]) <= 1e-13, name
    assert found.keys() == expected["weights"].keys()
    for name, value in expected["weights"].items():
        assert (found[name] - value).abs().max() <= 1e-12, name
    if replicas == 1:
        last = next(one for one in ranks if one["losses"])
        assert len(last["losses"]) == len(expected["losses"])
        assert max(abs(a - b) for a, b in zip(last["losses"], expected["losses"], strict=True)) <= 1e-13
        if "accumulate_grad_batches" in arguments:  # hooks of a window's batches come behind it
            return ranks
        for ours, theirs in zip(last["steps"], expected["steps"], strict=True):
            assert max(abs(ours[name] - theirs[name]) for name in theirs) <= 1e-13
    return ranks


@pytest.mark.parametrize("form", ["mean", "sum", "dict"])
@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_parts_of_equal_size_give_the_results_of_one_process(schedule: str, form: str) -> None:
    compare(2, Pipeline(micro_batches=4, schedule=schedule), form=form)


@pytest.mark.parametrize("form", ["mean", "sum"])
def test_parts_of_unequal_size_count_by_their_samples(form: str) -> None:
    ranks = compare(2, Pipeline(micro_batches=4), form=form, batch_size=7, count=38)  # the last batch has three
    sizes = [size for _, size in ranks[1]["seen"]]
    assert sizes == [2, 2, 2, 1] * 5 + [1, 1, 1]


@pytest.mark.parametrize("form", ["mean", "sum"])
def test_parts_of_several_accumulated_batches(form: str) -> None:
    # The last window has one batch, and the last batch has two samples.
    compare(2, Pipeline(micro_batches=2), form=form, batch_size=6, count=38, accumulate_grad_batches=3)


@pytest.mark.parametrize("form", ["mean", "sum"])
def test_parts_with_shards(form: str) -> None:
    compare(4, Pipeline(micro_batches=2), form=form, replicas=2)


def test_hooks_see_batches_and_backward_passes_see_parts() -> None:
    ranks = compare(2, Pipeline(micro_batches=4))
    assert ranks[0]["counts"] == {"start": 5, "before": 0, "after": 0, "end": 5}
    assert ranks[1]["counts"] == {"start": 5, "before": 20, "after": 20, "end": 5}
    assert ranks[1]["seen"] == [(index, 2) for index in range(5) for _ in range(4)]


def train(rank: int, size: int, steps: int, folder: str, save: str, resume: str | None) -> None:
    lw.seed_everything(1, verbose=False)
    mesh = MeshStrategy(pp=2, pipeline=Pipeline(micro_batches=4))
    trainer = trainer_of(size, mesh, max_epochs=9, max_steps=steps)
    module = Net(dropout=0.2)
    loader = DataLoader(Rows(40), batch_size=8, shuffle=True)
    trainer.fit(module, loader, ckpt_path=None if resume is None else f"{folder}/{resume}")
    trainer.save_checkpoint(f"{folder}/{save}")


def test_a_run_that_is_resumed_within_an_epoch_has_the_same_bits(tmp_path: Path) -> None:
    folder = str(tmp_path)
    run_ranks(train, 2, 7, folder, "long.ckpt", None, connect=False)
    run_ranks(train, 2, 3, folder, "half.ckpt", None, connect=False)
    run_ranks(train, 2, 7, folder, "resumed.ckpt", "half.ckpt", connect=False)
    long, resumed = (cast(dict[str, Any], storage.load(tmp_path / name)) for name in ("long.ckpt", "resumed.ckpt"))
    for name, value in long["state_dict"].items():
        assert torch.equal(value, resumed["state_dict"][name]), name


def refused(rank: int, size: int) -> str:
    def collate(rows: list[Any]) -> dict[str, Any]:
        return {**torch.utils.data.default_collate(rows), "weights": torch.ones(WORDS)}

    trainer = trainer_of(size, MeshStrategy(pp=2, pipeline=Pipeline(micro_batches=4)))
    try:
        trainer.fit(Net(), DataLoader(Rows(16), batch_size=8, collate_fn=collate))
    except lw.errors.DataError as error:
        return str(error)
    return "no error"


def test_a_batch_that_cannot_be_split_is_an_error_on_every_rank() -> None:
    answers = run_ranks(refused, 2, connect=False, timeout_s=60)
    assert all("micro_batches=4, got tensors of shapes (8,), (11,)" in answer for answer in answers), answers
