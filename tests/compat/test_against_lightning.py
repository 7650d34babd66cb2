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
NAMES = ("evaluate", "gan", "callbacks", "fabric_loop")

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
        command, cwd=folder, env=environment, text=True, capture_output=True, timeout=300, check=False
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
