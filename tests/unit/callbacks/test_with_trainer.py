"""The callbacks with the real Trainer: what the fake one cannot show."""

from __future__ import annotations

import csv
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import loopwright as lw
from loopwright.callbacks import (
    EMA,
    Callback,
    EarlyStopping,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelSummary,
    RichProgressBar,
    Timer,
    TQDMProgressBar,
)
from loopwright.errors import ModuleError
from loopwright.loggers import CSVLogger


class Net(lw.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x)
        return out

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = (self(batch) - batch.sum(1, keepdim=True)).pow(2).mean()
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", (self(batch) - batch.sum(1, keepdim=True)).pow(2).mean(), prog_bar=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def data(count: int = 24) -> Any:
    rows = torch.randn(count, 4, generator=torch.Generator().manual_seed(1))
    return DataLoader(rows, batch_size=4)  # type: ignore[arg-type]


def trainer_of(root: Path, *callbacks: Callback, **kwargs: Any) -> lw.Trainer:
    settings: dict[str, Any] = {
        "accelerator": "cpu",
        "default_root_dir": root,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": None if any(isinstance(c, ModelCheckpoint) for c in callbacks) else False,
        "num_sanity_val_steps": 0,
        "max_epochs": 2,
        "log_every_n_steps": 1,
    }
    return lw.Trainer(callbacks=list(callbacks), **{**settings, **kwargs})


def fit(trainer: lw.Trainer, ckpt_path: str | None = None) -> Net:
    lw.seed_everything(5, verbose=False)
    net = Net()
    trainer.fit(net, data(), data(8), ckpt_path=ckpt_path)
    return net


class KillAt(Callback):
    """Ends the run after so many micro-batches, as a kill would: nothing is saved for it."""

    def __init__(self, batches: int) -> None:
        self.left = batches

    def on_train_batch_end(self, *args: Any) -> None:
        self.left -= 1
        if self.left == 0:
            raise RuntimeError("killed")


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder)) if folder.is_dir() else []


def same(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor):
        return torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    return bool(first == second)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("stop", [1, 3, 4, 5, 6, 7, 9, 11])
def test_a_killed_run_ends_with_the_same_states_and_files(tmp_path: Path, stop: int, accumulate: int) -> None:
    def callbacks(folder: Path) -> list[Callback]:
        return [
            EMA(0.9),
            EarlyStopping("val_loss", patience=4),
            ModelCheckpoint(folder, "{step}-{val_loss:.3f}", "val_loss", save_top_k=2, every_n_train_steps=1),
        ]

    kwargs = {"val_check_interval": 2, "accumulate_grad_batches": accumulate}
    whole = callbacks(tmp_path / "a")
    expected = fit(trainer_of(tmp_path, *whole, **kwargs))
    with pytest.raises(RuntimeError, match="killed"):
        fit(trainer_of(tmp_path, KillAt(stop), *callbacks(tmp_path / "b"), **kwargs))
    left = set(names(tmp_path / "b"))
    again = callbacks(tmp_path / "b")
    got = fit(trainer_of(tmp_path, *again, **kwargs), ckpt_path="last")
    assert same(dict(got.state_dict()), dict(expected.state_dict()))
    for before, after in zip(whole, again, strict=True):
        moved = {key: value for key, value in after.state_dict().items() if "path" not in key and key != "dirpath"}
        plain = {key: value for key, value in before.state_dict().items() if key in moved}
        for state in (moved, plain):
            if "best_k_models" in state:
                state["best_k_models"] = {os.path.basename(p): v for p, v in state["best_k_models"].items()}
        assert same(moved, plain), type(after)
    assert set(names(tmp_path / "a")) <= set(names(tmp_path / "b"))
    assert len(set(names(tmp_path / "b")) - set(names(tmp_path / "a"))) <= min(len(left), 1)


def test_the_metric_in_the_name_is_that_of_the_weights_in_the_file(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(
        tmp_path / "c", "{step}-{val_loss:.6f}", "val_loss", save_top_k=-1, every_n_train_steps=2
    )
    trainer = trainer_of(tmp_path, checkpoint, val_check_interval=3)
    fit(trainer)
    assert [name.split("-")[0] for name in names(tmp_path / "c")] == ["step=12", "step=3", "step=6", "step=9"]
    for name in names(tmp_path / "c"):
        net = Net()
        checked = trainer_of(tmp_path).validate(net, data(8), ckpt_path=str(tmp_path / "c" / name), verbose=False)
        assert f"{checked[0]['val_loss']:.6f}" == name.split("val_loss=")[1].removesuffix(".ckpt")


def test_a_misspelt_monitor_is_an_error_at_the_first_validation(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, ModelCheckpoint(tmp_path / "c", monitor="val_los"), val_check_interval=2)
    with pytest.raises(ModuleError, match=r"did you mean 'val_loss'"):
        fit(trainer)
    assert trainer.global_step == 2


def test_metrics_of_the_training_epoch_can_be_monitored(tmp_path: Path) -> None:
    class EpochLoss(Net):
        validation_step = None

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            loss: Tensor = self(batch).pow(2).mean()
            self.log("loss", loss, on_step=True, on_epoch=True)
            return loss

    checkpoint = ModelCheckpoint(tmp_path / "c", "{epoch}-{loss_epoch:.2f}", monitor="loss_epoch", save_top_k=-1)
    trainer_of(tmp_path, checkpoint).fit(EpochLoss(), data())
    assert len(names(tmp_path / "c")) == 2


@pytest.mark.parametrize("bar", [TQDMProgressBar, RichProgressBar])
def test_a_bar_changes_no_bit(tmp_path: Path, bar: Any, capsys: pytest.CaptureFixture[str]) -> None:
    plain = fit(trainer_of(tmp_path))
    with_bar = fit(
        trainer_of(tmp_path, bar(), ModelSummary(), Timer(), enable_progress_bar=True, enable_model_summary=True)
    )
    assert same(dict(with_bar.state_dict()), dict(plain.state_dict()))
    out = capsys.readouterr().out
    assert "Epoch 1/1 | step 12/12" in out
    assert "val_loss=" in out


def test_learning_rates_stand_beside_the_steps_that_used_them(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, name="csv")
    trainer = trainer_of(tmp_path, LearningRateMonitor(), logger=logger, max_epochs=1, accumulate_grad_batches=2)
    fit(trainer)
    with open(Path(str(logger.log_dir)) / "metrics.csv", encoding="utf-8") as file:
        rows = [(int(row["step"]), float(row["lr-SGD"])) for row in csv.DictReader(file) if row.get("lr-SGD")]
    assert rows == [(0, 0.1), (1, 0.05), (2, 0.025)]


def test_ema_is_evaluated_and_the_raw_weights_are_trained(tmp_path: Path) -> None:
    plain = fit(trainer_of(tmp_path))
    ema = EMA(0.5)
    trainer = trainer_of(tmp_path, ema)
    trained = fit(trainer)
    assert same(dict(trained.state_dict()), dict(plain.state_dict()))
    averaged = Net()
    averaged.load_state_dict(ema.shadow_state_dict())
    expected = trainer_of(tmp_path).validate(averaged, data(8), verbose=False)
    assert trainer.validate(trained, data(8), verbose=False) == expected
    assert same(dict(trained.state_dict()), dict(plain.state_dict()))


def test_early_stopping_stops_and_a_resumed_run_stays_stopped(tmp_path: Path) -> None:
    def make() -> lw.Trainer:
        stopping = EarlyStopping("val_loss", patience=1, min_delta=1e6)
        return trainer_of(tmp_path, stopping, ModelCheckpoint(tmp_path / "c"), max_epochs=9)

    trainer = make()
    fit(trainer)
    assert trainer.current_epoch == 2
    again = make()
    fit(again, ckpt_path="last")
    assert again.global_step == trainer.global_step
    assert len(names(tmp_path / "c")) == 1


def test_an_exception_inside_a_window_is_saved_and_the_window_is_repeated(tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path / "c", save_on_exception=True, every_n_epochs=5)
    with pytest.raises(RuntimeError, match="killed"):
        fit(trainer_of(tmp_path, KillAt(5), saver, accumulate_grad_batches=2))
    assert names(tmp_path / "c") == ["epoch=0-step=2.ckpt"]
    resumed = trainer_of(tmp_path, ModelCheckpoint(tmp_path / "c", every_n_epochs=5), accumulate_grad_batches=2)
    fit(resumed, ckpt_path="last")
    assert (resumed.global_step, resumed.progress.total_batches) == (6, 12)


def test_links_lead_to_complete_files(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(
        tmp_path / "c", monitor="val_loss", mode="max", save_last="link", every_n_train_steps=1
    )
    trainer = trainer_of(tmp_path, checkpoint, val_check_interval=1)
    fit(trainer)
    last = torch.load(tmp_path / "c" / "last.ckpt", weights_only=True)
    assert last["global_step"] == trainer.global_step
    for name in names(tmp_path / "c"):
        if name.startswith("epoch"):
            content = torch.load(tmp_path / "c" / name, weights_only=True)
            assert name == f"epoch={content['epoch']}-step={content['global_step']}.ckpt"


class Counts(Callback):
    """Counts events, and keeps the counts as its state."""

    def __init__(self) -> None:
        self.counts = {"batches": 0, "validations": 0, "epochs": 0}

    def on_train_batch_end(self, *args: Any) -> None:
        self.counts["batches"] += 1

    def on_validation_end(self, *args: Any) -> None:
        self.counts["validations"] += 1

    def on_train_epoch_end(self, *args: Any) -> None:
        self.counts["epochs"] += 1

    def state_dict(self) -> dict[str, Any]:
        return dict(self.counts)


def test_states_are_those_after_the_event_wherever_the_checkpoint_callback_stands(tmp_path: Path) -> None:
    for number, at in enumerate((0, 1)):
        callbacks: list[Callback] = [Counts()]
        folder = tmp_path / str(number)
        callbacks.insert(at, ModelCheckpoint(folder, "{epoch}-{step}", save_top_k=-1, every_n_epochs=1))
        trainer = trainer_of(tmp_path, *callbacks, max_epochs=2, num_sanity_val_steps=0)
        fit(trainer)
        steps = trainer.global_step // 2
        for epoch in (1, 2):
            (path,) = folder.glob(f"epoch={epoch - 1}-*.ckpt")
            saved = torch.load(path, weights_only=True)
            batches = {"batches": epoch * steps, "validations": epoch}
            counts = dict(saved["callbacks"][callbacks[1 - at].state_key])
            assert counts.pop("epochs") in (epoch - 1, epoch)  # saved at the validation, or after it
            assert counts == batches
            # One step of the schedule per optimizer step: none is owed.
            assert saved["lr_schedulers"][0]["last_epoch"] == saved["global_step"] == epoch * steps
