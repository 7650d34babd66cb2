"""Metrics, callbacks and loggers of a Trainer on two ranks: the same decisions and records as on one."""

from __future__ import annotations

import csv
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import loopwright as lw

torchmetrics = pytest.importorskip("torchmetrics")


class Net(lw.Module):
    """Logs in every way: by step and epoch, over ranks or not, on rank 0 only, with metric objects."""

    def __init__(self, *, metric_everywhere: bool = True) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layer = nn.Linear(4, 1).double()
        self.train_mean = torchmetrics.MeanMetric()
        self.val_cat = torchmetrics.AUROC(task="binary")
        self.metric_everywhere = metric_everywhere

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        losses = (self.layer(batch[0]) - batch[1]).square()
        loss = losses.mean()
        self.log("loss", loss, on_epoch=True, sync_dist=True, prog_bar=True)
        self.log("own", float(self.trainer.global_rank))
        self.train_mean.update(losses.detach())
        self.log("object", self.train_mean, on_step=False, on_epoch=True)
        if self.trainer.global_rank == 0:
            self.log("zero", 5.0, on_step=False, on_epoch=True, rank_zero_only=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        losses = (self.layer(batch[0]) - batch[1]).square()
        self.log("val_loss", losses.mean())
        self.log("count", float(len(losses)), reduce_fx="sum")
        self.log("one", 1.0)
        self.val_cat.update(torch.sigmoid(self.layer(batch[0])).flatten().float(), (batch[1].flatten() > 0).long())
        if self.metric_everywhere or self.trainer.global_rank == 0:
            self.log("auroc", self.val_cat)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def data(count: int, seed: int = 5) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 4, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, torch.randn(count, 1, generator=generator, dtype=torch.float64))


def fit(
    rank: int, size: int, root: Path, *, ckpt_path: str | None = None, net: dict[str, Any] | None = None, **options: Any
) -> dict[str, Any]:
    module = Net(**(net or {}))
    checkpoint = lw.ModelCheckpoint(monitor="val_loss", save_top_k=1, save_last=True, filename="{epoch}-{val_loss:.4f}")
    extra = options.pop("callbacks", list)()
    trainer = lw.Trainer(
        accelerator="cpu", devices=size, strategy="ddp" if size > 1 else "auto",
        logger=lw.CSVLogger(root, name="runs"), callbacks=[checkpoint, *extra], default_root_dir=root,
        enable_progress_bar=False, enable_model_summary=False, **{"max_epochs": 3, "log_every_n_steps": 2, **options},
    )  # fmt: skip
    trainer.fit(
        module, DataLoader(data(32), batch_size=8 // size), DataLoader(data(13, 6), batch_size=2), ckpt_path=ckpt_path
    )
    return {
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items() if name != "own"},
        "logged": trainer.logged_metrics,
        "bar": dict(trainer.progress_bar_metrics),
        "best": checkpoint.best_model_path,
        "log_dir": trainer.log_dir,
        "steps": trainer.global_step,
        "epochs": trainer.current_epoch,
    }


def rows_of(folder: Path) -> list[dict[str, str]]:
    with open(folder / "metrics.csv") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("everywhere", [True, False])
def test_two_ranks_record_what_one_process_records(tmp_path: Path, everywhere: bool) -> None:
    alone = fit(0, 1, tmp_path / "alone", net={"metric_everywhere": everywhere})
    both = run_ranks(fit, 2, tmp_path / "both", connect=False, net={"metric_everywhere": everywhere})
    assert both[0] == both[1]
    assert both[0]["metrics"]["one"] == 1.0
    assert both[0]["metrics"]["count"] == 13.0
    assert both[0]["metrics"]["zero"] == 5.0
    for what in ("metrics", "logged", "bar"):
        assert both[0][what] == {name: pytest.approx(value, rel=1e-6) for name, value in alone[what].items()}
    assert os.path.basename(both[0]["best"]) == os.path.basename(alone["best"])
    runs = tmp_path / "both" / "runs"
    assert [path.name for path in runs.iterdir()] == ["version_0"]
    assert both[0]["log_dir"] == str(runs / "version_0")
    pairs = zip(rows_of(tmp_path / "alone" / "runs" / "version_0"), rows_of(runs / "version_0"), strict=True)
    for expected, row in pairs:
        assert row.keys() == expected.keys()
        assert all(
            not cell or float(cell) == pytest.approx(float(expected[key]), rel=1e-6) for key, cell in row.items()
        )
    assert sorted(os.listdir(runs / "version_0" / "checkpoints")) == sorted(
        os.listdir(tmp_path / "alone" / "runs" / "version_0" / "checkpoints")
    )


@pytest.mark.parametrize("size", [1, 2])
def test_a_run_that_stops_in_an_epoch_goes_on_in_its_files_with_the_same_values(tmp_path: Path, size: int) -> None:
    whole = run_ranks(fit, 2, tmp_path / "whole", connect=False, max_steps=10, max_epochs=-1)[0]
    run_ranks(fit, 2, tmp_path / "cut", connect=False, max_steps=6, max_epochs=-1)
    if size == 2:
        again = run_ranks(fit, 2, tmp_path / "cut", connect=False, max_steps=10, max_epochs=-1, ckpt_path="last")[0]
        assert again["metrics"] == whole["metrics"]  # the same bits
    else:
        again = fit(0, 1, tmp_path / "cut", max_steps=10, max_epochs=-1, ckpt_path="last")
        assert again["metrics"] == {name: pytest.approx(value, rel=1e-6) for name, value in whole["metrics"].items()}
    assert [path.name for path in (tmp_path / "cut" / "runs").iterdir()] == ["version_0"]
    expected, found = (rows_of(tmp_path / name / "runs" / "version_0") for name in ("whole", "cut"))
    steps = [row["step"] for row in found if row["loss_step"]]
    assert steps == [row["step"] for row in expected if row["loss_step"]]


class Lonely(lw.Callback):
    """Asks to stop on one rank only."""

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.global_rank == 1 and not trainer.sanity_checking:
            trainer.should_stop = True


def test_early_stopping_and_a_request_of_one_rank_end_all_at_one_step(tmp_path: Path) -> None:
    def stopping() -> list[lw.Callback]:
        return [lw.EarlyStopping("val_loss", stopping_threshold=1e9)]

    first, second = run_ranks(fit, 2, tmp_path / "a", connect=False, callbacks=stopping)
    assert first == second
    assert first["epochs"] == 1
    first, second = run_ranks(fit, 2, tmp_path / "b", connect=False, callbacks=lambda: [Lonely()])
    assert first == second
    assert first["epochs"] in (1, 2)


def fit_unevenly(rank: int, size: int, root: Path) -> Any:
    from loopwright.strategies.ddp.strategy import DDPStrategy

    checkpoint = lw.ModelCheckpoint(root, every_n_train_steps=1, save_top_k=-1)
    ema = lw.EMA(decay=0.5)
    trainer = lw.Trainer(
        accelerator="cpu", devices=size, strategy=DDPStrategy(uneven="zero_weight"), max_epochs=1, logger=False,
        callbacks=[checkpoint, ema, lw.Timer("00:01:00:00")], enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=root, log_every_n_steps=1, limit_val_batches=0,
    )  # fmt: skip
    trainer.fit(Net(), DataLoader(data(5), batch_size=1))
    return (
        ema.num_updates,
        trainer.global_step,
        {name: value.tolist() for name, value in ema.shadow_state_dict().items()},
    )


def test_a_rank_without_a_batch_takes_part_in_logging_averaging_and_checkpoints(tmp_path: Path) -> None:
    first, second = run_ranks(fit_unevenly, 2, tmp_path, connect=False)
    assert first == second
    assert first[:2] == (3, 3)  # five samples on two ranks: in the third step one of them has none
    assert sorted(path.name for path in tmp_path.glob("*.ckpt")) == [f"epoch=0-step={step}.ckpt" for step in (1, 2, 3)]
