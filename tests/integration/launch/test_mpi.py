"""Processes that mpiexec started are found, and train as one."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mpi4py")

PROGRAM = """
import sys
import torch
from torch.utils.data import DataLoader
import loopwright as lw
from loopwright.tuner import Tuner


class Net(lw.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


trainer = lw.Trainer(
    accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False,
)
net = Net()
loader = DataLoader(torch.ones(8, 4), batch_size=2)
tuner = Tuner(trainer)
curve = tuner.lr_find(net, loader, num_training=2, update_attr=False)
steps = len(tuner.preview_schedule(net, loader).lrs["lr-SGD"])
trainer.fit(net, loader)
found = type(trainer.fabric.cluster_environment).__name__, trainer.global_rank, trainer.world_size, trainer.global_step
found = *found, len(curve.raw_losses), steps
# In one piece: the ranks share the pipe.
sys.stdout.write(" ".join(map(str, (*found, float(net.layer.weight.sum())))) + "\\n")
sys.stdout.flush()
"""


def test_mpiexec_starts_the_ranks(tmp_path: Path) -> None:
    mpiexec = shutil.which("mpiexec", path=str(Path(sys.executable).parent)) or shutil.which("mpiexec")
    if mpiexec is None:
        pytest.skip("there is no mpiexec")
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    done = subprocess.run(
        [mpiexec, "-n", "2", sys.executable, str(script)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = sorted(line.split() for line in done.stdout.splitlines() if line.startswith("MPIEnvironment"))
    assert [line[1:6] for line in lines] == [["0", "2", "2", "2", "2"], ["1", "2", "2", "2", "2"]], done.stdout
    assert lines[0][6] == lines[1][6]
