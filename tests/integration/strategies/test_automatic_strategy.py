"""The strategy that fit chooses by itself: on ranks that were started in any way, and as if the user had written it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

PROGRAM = """
import json, os, sys, time
if "notebook" in sys.argv:
    sys.ps1 = ">>> "
import torch, loopwright as lw
from loopwright.accelerators import CPUAccelerator
from loopwright.trainer.session import automatic_strategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

class Small(CPUAccelerator):
    def device_memory(self, device):
        return 1.2e6

class Net(lw.Module):
    def __init__(self, reads=False, sleeps=0):
        super().__init__()
        self.reads, self.sleeps = reads, sleeps
    def configure_model(self):
        if not hasattr(self, "layers"):
            torch.manual_seed(0)
            self.layers = nn.ModuleList(nn.Linear(128, 128) for _ in range(4))
    def training_step(self, batch, batch_idx):
        time.sleep(self.sleeps)
        x = batch[0]
        for layer in self.layers:
            x = nn.functional.dropout(layer(x).relu(), 0.1)
        self.log("loss", x.mean())
        return x.mean() * (2 if self.reads and int(x.argmax()) < 0 else 1)
    def validation_step(self, batch, batch_idx):
        self.log("seen", batch[0].mean())
    def configure_optimizers(self):
        assert self.trainer.estimated_stepping_batches > 0
        return torch.optim.Adam(self.parameters())

class Data(lw.DataModule):
    prepared = 0
    def prepare_data(self):
        Data.prepared += 1
        torch.rand(3)
    def setup(self, stage):
        torch.rand(self.trainer.world_size)
    def train_dataloader(self):
        torch.rand(1)
        rows = torch.randn(32, 128, generator=torch.Generator().manual_seed(1))
        return DataLoader(TensorDataset(rows), batch_size=4, shuffle=True, num_workers=1)
    val_dataloader = train_dataloader

def trainer(strategy="auto", **arguments):
    quiet = dict.fromkeys(("enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    return lw.Trainer(
        accelerator=Small(), devices=2, strategy=strategy, max_epochs=1, num_sanity_val_steps=0,
        default_root_dir=sys.argv[1], logger="csv", **quiet, **arguments,
    )

def fit(strategy="auto", limit=600, validates=False, **options):
    automatic_strategy.PLAN_S, automatic_strategy.TRIAL_S = limit, limit
    lw.seed_everything(3, verbose=False)
    chosen, net, data = trainer(strategy), Net(**options), Data()
    if validates:
        chosen.validate(net, datamodule=data, verbose=False)
    chosen.fit(net, datamodule=data)
    path = os.path.join(sys.argv[1], "last.ckpt")
    chosen.save_checkpoint(path)
    saved = torch.load(path, weights_only=True)
    sums = [value.double().sum().item() for value in saved["state_dict"].values()]
    settled = saved["loopwright"].get("settled", {})
    names = [trial["name"] for trial in settled.get("trials", [])]
    rows = {} if not settled.get("plan") else {row["name"]: row["peak"] for row in settled["plan"]["rows"]}
    found = {"kind": type(chosen.strategy).__name__, "name": settled.get("name"), "why": settled.get("reason"),
             "weights": sums, "drawn": torch.rand(1).item(), "tried": names, "rows": rows}
    if "again" in sys.argv:
        chosen.fit_loop.max_epochs = 2
        chosen.fit(net, datamodule=data)
        chosen.validate(net, datamodule=data, verbose=False)
        found["after"] = type(chosen.strategy).__name__
    if chosen.is_global_zero:
        print(f"FOUND {json.dumps(found)}", flush=True)

if __name__ == "__main__":
    for options in json.loads(sys.argv[2]):
        fit(**options)
"""


def launch(folder: Path, fits: list[dict[str, object]], *flags: str, way: str = "script") -> subprocess.Popen[str]:
    program = folder / "program.py"
    program.write_text(PROGRAM)
    start = ["-m", "torch.distributed.run", "--nproc-per-node=2"] if way == "torchrun" else []
    command = [sys.executable, *start, str(program), str(folder), json.dumps(fits), way, *flags]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )


def found_by(process: subprocess.Popen[str]) -> tuple[list[dict[str, object]], str]:
    output, _ = process.communicate(timeout=900)
    assert process.returncode == 0, output
    lines = [line.removeprefix("FOUND ") for line in output.splitlines() if line.startswith("FOUND ")]
    return [json.loads(line) for line in lines], output


@pytest.mark.parametrize("way", ["script", "torchrun", "notebook"])
def test_fit_takes_the_first_strategy_that_fits_as_if_it_were_written(way: str, tmp_path: Path) -> None:
    fits: list[dict[str, object]] = [{}]
    fits += [{"strategy": "fsdp"}, {"validates": True}, {"limit": 0}] if way == "script" else []
    (auto, *others), output = found_by(launch(tmp_path, fits, *(["again"] if way != "notebook" else []), way=way))
    assert auto["kind"] == "FSDPStrategy"
    assert auto["name"] == "fsdp"
    assert f"strategy='auto' takes fsdp: {auto['why']}" in output
    rows = auto["rows"]
    assert isinstance(rows, dict)
    assert [*rows] == ["ddp", "fsdp"]
    assert rows["fsdp"] <= 0.9 * 1.2e6 < rows["ddp"]
    beside = json.loads((tmp_path / "loopwright_logs" / "version_0" / "strategy.json").read_text())
    assert beside["name"] == "fsdp"
    if way != "notebook":
        assert auto["after"] == "FSDPStrategy"
    if way == "script":
        written, validated, late = others
        assert (written["weights"], written["drawn"]) == (auto["weights"], auto["drawn"])
        assert validated["kind"] == "FSDPStrategy"
        assert (late["kind"], late["why"]) == ("DDPStrategy", "planning took more than 0 s")


def test_a_mesh_is_searched_with_trial_steps_that_leave_no_trace(tmp_path: Path) -> None:
    fits = [{"strategy": "mesh:auto"}, {"strategy": "mesh:auto", "reads": True}]
    (auto, reads), output = found_by(launch(tmp_path, fits))
    assert auto["name"] in ("mesh:dp=2", "mesh:fsdp=2")
    assert auto["tried"] == ["mesh:fsdp=2"]  # the other one does not fit
    assert "Trial steps:\n  mesh:fsdp=2: " in output
    (written,), _ = found_by(launch(tmp_path, [{"strategy": auto["name"]}]))
    assert (written["weights"], written["drawn"]) == (auto["weights"], auto["drawn"])
    assert "reads values" in str(reads["why"])
    assert reads["tried"] == []


def test_ctrl_c_ends_the_planning_and_leaves_no_process(tmp_path: Path) -> None:
    process = launch(tmp_path, [{"sleeps": 10000}])
    assert process.stdout is not None
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    planning: list[str] = []
    while not planning:
        assert process.poll() is None
        inner = [Path(f"/proc/{child}/task/{child}/children") for child in children.read_text().split()]
        planning = [text for one in inner if one.exists() for text in one.read_text().split()]
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=300)
    assert process.returncode in (130, -signal.SIGINT), output
    assert not [one for one in planning if Path(f"/proc/{one}/cmdline").exists() and _runs(one)]


def _runs(pid: str) -> bool:
    return "program.py" in Path(f"/proc/{pid}/cmdline").read_text()
