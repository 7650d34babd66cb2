"""Compares programs with Lightning itself: `LIGHTNING_PYTHON=/venv/bin/python pytest tests/compat`.

That interpreter is one of an environment with torch and lightning 2.6. With WRITE_EXPECTED=1 the numbers that Lightning
prints become tests/fixtures/lightning_programs/expected.json, which `make test` compares with.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAMS = Path(__file__).parents[1] / "fixtures" / "lightning_programs"
LIGHTNING = os.environ.get("LIGHTNING_PYTHON", "")
OURS = [sys.executable, "-m", "loopwright", "run-lightning"]
NAMES = ("evaluate", "gan", "callbacks", "fabric_loop", "contract")

pytestmark = pytest.mark.skipif(not LIGHTNING, reason="LIGHTNING_PYTHON names no interpreter with Lightning")

_TRAIN = """
import sys, torch, json
import lightning as L
from torch.utils.data import DataLoader, TensorDataset

class Net(L.LightningModule):
    def __init__(self, width: int = 2):
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(width, 1)
        torch.nn.init.ones_(self.layer.weight); torch.nn.init.zeros_(self.layer.bias)
    def training_step(self, batch, batch_idx):
        loss = (self.layer(batch[0]) - 3).square().mean()
        self.log("loss", loss)
        return loss
    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.05)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

data = TensorDataset(torch.linspace(0, 1, 32).reshape(16, 2))
def trainer(epochs):
    return L.Trainer(max_epochs=epochs, accelerator="cpu", logger=False, enable_progress_bar=False,
                     enable_model_summary=False, callbacks=[L.pytorch.callbacks.ModelCheckpoint(dirpath=sys.argv[1])])
model = Net()
t = trainer(int(sys.argv[2]))
t.fit(model, DataLoader(data, batch_size=4), ckpt_path=sys.argv[3] if len(sys.argv) > 3 else None)
again = Net.load_from_checkpoint(t.checkpoint_callback.best_model_path)
print(json.dumps({"weight": [round(v, 5) for v in model.layer.weight.flatten().tolist()], "steps": t.global_step,
                  "epochs": t.current_epoch, "lr": t.optimizers[0].param_groups[0]["lr"],
                  "path": t.checkpoint_callback.best_model_path,
                  "same": bool(torch.equal(again.layer.weight, model.layer.weight))}))
"""


def run(command: list[str], folder: Path) -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PL_")}
    found = subprocess.run(
        command, cwd=folder, env=environment, text=True, capture_output=True, timeout=900, check=False
    )
    assert found.returncode == 0, found.stderr
    lines = [line for line in found.stdout.splitlines() if line.startswith("{")]
    return json.loads(lines[-1])  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", NAMES)
def test_a_program_prints_the_same_numbers_on_both(name: str, tmp_path: Path) -> None:
    program = str(PROGRAMS / f"{name}.py")
    theirs = run([LIGHTNING, program, str(tmp_path / "theirs")], tmp_path / "theirs")
    ours = run([*OURS, program, str(tmp_path / "ours")], tmp_path / "ours")
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        if isinstance(value, float):
            value = pytest.approx(value, abs=2e-5)
        assert ours[key] == value, key
    if os.environ.get("WRITE_EXPECTED"):
        path = PROGRAMS / "expected.json"
        known = json.loads(path.read_text()) if path.is_file() else {}
        path.write_text(json.dumps({**known, name: theirs}, indent=1, sort_keys=True) + "\n")


@pytest.mark.parametrize("first", ["ours", "theirs"])
def test_a_run_begins_on_one_and_goes_on_on_the_other(first: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_TRAIN)
    commands = {"ours": OURS, "theirs": [LIGHTNING]}
    second = "theirs" if first == "ours" else "ours"
    program = str(tmp_path / "train.py")
    whole = run([*commands[second], program, str(tmp_path / "whole"), "3"], tmp_path / "whole")
    begun = run([*commands[first], program, str(tmp_path / "begun"), "2"], tmp_path / "begun")
    ended = run([*commands[second], program, str(tmp_path / "ended"), "3", begun["path"]], tmp_path / "ended")
    for key in ("weight", "steps", "epochs", "lr", "same"):
        assert ended[key] == (pytest.approx(whole[key], abs=2e-5) if key == "weight" else whole[key]), key


def test_a_converted_file_of_a_program_without_this_layer_goes_on_in_lightning(tmp_path: Path) -> None:
    plain = _TRAIN.replace("import lightning as L", "import loopwright as L").replace("LightningModule", "Module")
    plain = plain.replace("L.pytorch.callbacks.ModelCheckpoint", "L.ModelCheckpoint")
    (tmp_path / "plain.py").write_text(plain)
    (tmp_path / "train.py").write_text(_TRAIN)
    begun = run([sys.executable, str(tmp_path / "plain.py"), str(tmp_path / "begun"), "2"], tmp_path / "begun")
    converted = str(tmp_path / "converted.ckpt")
    assert loopwright("checkpoint", "convert", begun["path"], converted, "--to", "lightning") == 0
    theirs = [LIGHTNING, str(tmp_path / "train.py")]
    whole = run([*theirs, str(tmp_path / "whole"), "3"], tmp_path / "whole")
    ended = run([*theirs, str(tmp_path / "ended"), "3", converted], tmp_path / "ended")
    for key in ("weight", "steps", "epochs", "lr", "same"):
        assert ended[key] == (pytest.approx(whole[key], abs=2e-5) if key == "weight" else whole[key]), key


def loopwright(*arguments: str) -> int:
    return subprocess.run([sys.executable, "-m", "loopwright", *arguments], timeout=900, check=False).returncode


_MIDDLE = """
import sys, torch, json, os, enum
import lightning as L
from torch.utils.data import DataLoader, TensorDataset

class Kind(enum.Enum):
    A = 1

class Net(L.LightningModule):
    def __init__(self, kind=Kind.A, act=torch.nn.Tanh(), deep=(torch.nn.ReLU,)):
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(1, 1)
        torch.nn.init.ones_(self.layer.weight); torch.nn.init.zeros_(self.layer.bias)
    def training_step(self, batch, batch_idx):
        seen.append([self.current_epoch, batch_idx, self.global_step, batch[0][0].item()])
        return (self.layer(batch[0]) - 3).square().mean()
    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

seen = []
saving = L.pytorch.callbacks.ModelCheckpoint(dirpath=sys.argv[1], every_n_train_steps=3, save_top_k=-1)
t = L.Trainer(max_steps=int(sys.argv[2]), max_epochs=-1, accelerator="cpu", logger=False, enable_progress_bar=False,
              enable_model_summary=False, callbacks=[saving])
model = Net()
data = DataLoader(TensorDataset(torch.arange(8.0).reshape(8, 1)), batch_size=1)
path = sys.argv[3] if len(sys.argv) > 3 else None
t.fit(model, data, ckpt_path=path, weights_only=False)
hparams = dict(Net.load_from_checkpoint(path or os.path.join(sys.argv[1], "epoch=0-step=3.ckpt"),
                                        weights_only=False).hparams)
print(json.dumps({"seen": seen, "weight": round(model.layer.weight.item(), 6), "step": t.global_step,
                  "lr": t.optimizers[0].param_groups[0]["lr"], "batch": t.fit_loop.total_batch_idx,
                  "hparams": [hparams["kind"].name, type(hparams["act"]).__name__, hparams["deep"][0].__name__]}))
"""


@pytest.mark.parametrize("first", ["ours", "theirs"])
def test_a_run_goes_on_in_the_middle_of_an_epoch(first: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_MIDDLE)
    program = str(tmp_path / "train.py")
    theirs = [LIGHTNING, program]
    whole = run([*OURS, program, str(tmp_path / "whole"), "10"], tmp_path / "whole")
    begun = run([*(OURS if first == "ours" else theirs[:1]), program, str(tmp_path / "begun"), "4"], tmp_path / "begun")
    assert begun["hparams"] == ["A", "Tanh", "ReLU"]
    path = str(tmp_path / "begun" / "epoch=0-step=3.ckpt")
    ended = run([*OURS, program, str(tmp_path / "ended"), "10", path], tmp_path / "ended")
    assert ended == {**whole, "seen": whole["seen"][3:]}
    # Lightning counts on where the file was taken, and reads the epoch's data from their beginning.
    in_lightning = run([*theirs, str(tmp_path / "there"), "10", path], tmp_path / "there")
    assert [item[:3] for item in in_lightning["seen"]] == [item[:3] for item in whole["seen"][3:]]
    for key in ("step", "lr", "batch", "hparams"):
        assert in_lightning[key] == pytest.approx(whole[key]) if key == "lr" else in_lightning[key] == whole[key], key
