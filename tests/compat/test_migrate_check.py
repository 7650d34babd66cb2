"""`loopwright migrate check`, with Lightning itself: an equal program, and one that parity does not cover."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

PYTHON = os.environ.get("LIGHTNING_PYTHON", "")

pytestmark = pytest.mark.skipif(not PYTHON, reason="LIGHTNING_PYTHON names no interpreter with Lightning")

_PROGRAM = """
import sys, torch, lightning as L
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint, ModelPruning

class Net(L.LightningModule):
    def __init__(self, width: int = 8, lr: float = 0.01):
        super().__init__()
        self.lr = lr
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(width, 1))
    def training_step(self, batch, batch_idx):
        loss = (self.net(batch[0]) - batch[1]).square().mean()
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss
    def validation_step(self, batch, batch_idx):
        self.log("val_loss", (self.net(batch[0]) - batch[1]).square().mean())
    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=self.lr)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

    def on_save_checkpoint(self, checkpoint):
        pass

class Note(Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        pass
    def on_validation_end(self, trainer, module):
        pass

L.seed_everything(1)
data = torch.randn(64, 4)
data = TensorDataset(data, data.sum(1, keepdim=True))
loaders = [DataLoader(data, batch_size=8, shuffle=True), DataLoader(data, batch_size=8)]
more = [ModelPruning("l1_unstructured", amount=0.5)] if "prune" in sys.argv else []
saving = ModelCheckpoint(monitor="val_loss", save_last=True)
callbacks = [Note(), saving, EarlyStopping("val_loss"), *more]
trainer = L.Trainer(max_epochs=20, devices=2, strategy="ddp", callbacks=callbacks)
model = Net()
if "search" in sys.argv:
    L.pytorch.tuner.Tuner(trainer).lr_find(model, loaders[0], num_training=5, update_attr=False)
trainer.fit(model, *loaders)
trainer.validate(dataloaders=loaders[1])
"""


def check(folder: Path, *arguments: str) -> tuple[int, str]:
    (folder / "train.py").write_text(_PROGRAM)
    command = [PYTHON, "-m", "loopwright", "migrate", "check", "--timeout", "600", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    found = subprocess.run(
        command, cwd=folder, env=environment, text=True, capture_output=True, timeout=900, check=False
    )
    return found.returncode, found.stdout + found.stderr


def test_an_equal_program_and_what_differs_without_parity(tmp_path: Path) -> None:
    code, text = check(tmp_path, "--without-parity", "train.py")
    assert code == 0, text
    assert "Equal. Compared: 1 fit, 1 validate, 4 training steps, 12 batches" in text
    assert "without --parity" in text.lower()
    assert "First difference (call 1 of the Trainer, fit, training step 3): the data of the batch" in text
    assert "switch random_numbers, tried" in text
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


def test_a_program_that_prunes_is_equal(tmp_path: Path) -> None:
    code, text = check(tmp_path, "train.py", "prune")
    assert code == 0, text


def test_a_difference_that_parity_does_not_cover_is_named_with_its_row(tmp_path: Path) -> None:
    code, text = check(tmp_path, "train.py", "search")
    assert code == 1, text
    assert "on_save_checkpoint" in text
    assert "A search of a learning rate or a batch size saves no checkpoint of its own" in text


def test_every_method_that_is_never_called_is_one_of_lightning() -> None:
    code = (
        "import json, sys; from loopwright.compat.lightning.imports.never_called import LOOPS, NEVER_CALLED, _MODULES\n"
        "from importlib import import_module\n"
        "missing = []\n"
        "for name in (*LOOPS, *NEVER_CALLED):\n"
        "    found = [getattr(import_module(one), name) for one in _MODULES if hasattr(import_module(one), name)]\n"
        "    missing += [] if found or name == '_Loop' else [name]\n"
        "    missing += [f'{name}.{m}' for m in NEVER_CALLED.get(name, '').split() if not hasattr(found[0], m)]\n"
        "print(json.dumps(missing))\n"
    )
    found = subprocess.run([PYTHON, "-c", code], text=True, capture_output=True, timeout=900, check=False)
    assert found.returncode == 0, found.stderr
    assert json.loads(found.stdout.splitlines()[-1]) == []
