"""Limits of Trainers, copies of folders, and a program that is recorded."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from loopwright.compat.lightning.check.child_program import copy_files, run_side
from loopwright.compat.lightning.check.compare import find_difference
from loopwright.compat.lightning.check.recorder import limit
from loopwright.strategies import DDPStrategy

_PROGRAM = """
import torch
import lightning as L
from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader, TensorDataset

class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
    def training_step(self, batch, batch_idx):
        loss = self.layer(batch[0]).square().mean()
        self.log("loss", loss)
        return loss
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

class Note(Callback):
    def on_train_epoch_end(self, trainer, module):
        super().on_train_epoch_end(trainer, module)

data = DataLoader(TensorDataset(torch.arange(32.0).reshape(32, 1)), batch_size=4)
for seed in range(2):
    L.seed_everything(seed)
    logger = L.pytorch.loggers.CSVLogger("logs")
    trainer = L.Trainer(max_epochs=9, devices=2, strategy="ddp", logger=logger, callbacks=[Note()])
    trainer.fit(Net(), data)
path = trainer.checkpoint_callback.best_model_path
again = L.Trainer(max_epochs=9, logger=False, callbacks=[Note()], default_root_dir="again")
again.fit(Net(), data, ckpt_path=path)
"""


def test_a_fit_makes_its_steps_in_two_epochs_and_one_process() -> None:
    found = limit({"devices": 8, "strategy": "ddp", "max_epochs": 100, "accumulate_grad_batches": 3}, 4)
    assert found["max_epochs"] == 2
    assert "max_steps" not in found
    assert found["limit_train_batches"] == 6
    assert (found["accelerator"], found["devices"], found["num_nodes"], found["strategy"]) == ("cpu", 1, 1, "auto")


def test_smaller_limits_of_the_program_stay() -> None:
    found = limit({"max_steps": 2, "limit_train_batches": 1, "limit_val_batches": 0, "max_epochs": 1}, 4)
    assert (found["max_steps"], found["limit_train_batches"], found["limit_val_batches"]) == (2, 1, 0)
    assert limit({"limit_train_batches": 0.5, "max_epochs": 1}, 4)["limit_train_batches"] == 4
    assert "max_steps" not in limit({"fast_dev_run": True}, 4)


@pytest.mark.parametrize(("given", "becomes"), [(500, 2), (0.1, 0.5), (0.5, None), (1, None), (None, None)])
def test_validations_are_due_within_the_limits(given: object, becomes: object) -> None:
    assert limit({"val_check_interval": given}, 4).get("val_check_interval") == becomes


def test_strategies_of_the_program_stay() -> None:
    class Mine(DDPStrategy):
        pass

    own = Mine()
    assert limit({"strategy": own}, 4)["strategy"] is own
    assert limit({"strategy": DDPStrategy()}, 4)["strategy"] == "auto"


def test_a_copy_keeps_the_files_of_the_program_apart(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "package").mkdir(parents=True)
    (source / ".git").mkdir()
    (source / "package" / "net.py").write_text("x = 1")
    with (source / "big.bin").open("wb") as file:
        file.truncate(11 * 2**20)
    copy_files(source, source / "out" / "work", left_out=source / "out")
    copied = source / "out" / "work"
    (copied / "package" / "net.py").write_text("x = 2")
    assert (source / "package" / "net.py").read_text() == "x = 1"
    assert (copied / "big.bin").is_symlink()
    assert not (copied / ".git").exists()
    assert not (copied / "out").exists()


@pytest.mark.slow
def test_two_runs_of_a_program_leave_the_same_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "program").mkdir()
    (tmp_path / "program" / "train.py").write_text(_PROGRAM)
    monkeypatch.chdir(tmp_path / "program")
    sides = [
        run_side(sys.executable, ["train.py"], tmp_path / name, steps=4, parity="1", timeout_s=60)
        for name in ("first", "second")
    ]
    for side in sides:
        assert side.problem == ""
        counts = side.record.counts()
        assert counts.startswith("3 fit, 12 training steps, 12 batches, 21 hook calls")
        assert "8 logged rows, 9 events of checkpoint files" in counts
        assert side.record.changed == {"devices", "strategy", "max_epochs"}
    assert find_difference(sides[0].record, sides[1].record) is None
    assert sorted(path.name for path in Path.cwd().iterdir()) == ["train.py"]
