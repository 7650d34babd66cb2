"""Programs that run in Ray's workers as they are: `loopwright launch --ray`, ray.train.lightning, the guide's."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(900)]

GUIDE = Path(__file__).resolve().parents[3] / "docs" / "engines.md"

TRAIN = """
import os, sys
import beside, torch
import loopwright as lw
from torch.utils.data import DataLoader, TensorDataset

class Net(lw.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
    def training_step(self, batch, batch_idx):
        if self.trainer.global_step == 5 and self.trainer.global_rank == 1:
            raise ValueError("a bad sample")
        return self.layer(batch[0]).pow(2).mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

if __name__ == "__main__":
    trainer = lw.Trainer(logger=False, enable_progress_bar=False, enable_checkpointing=False)
    with open(f"rank-{trainer.global_rank}", "w") as file:
        print(trainer.world_size, trainer.precision, *sys.argv[1:], file=file)
    trainer.fit(Net(), DataLoader(TensorDataset(torch.ones(64, 4)), batch_size=4))
"""


def loopwright(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "loopwright", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600, check=False)


def test_a_script_runs_in_workers_and_its_error_names_rank_hook_and_step(cluster: Any, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "beside.py").touch()
    options = ["--accelerator", "cpu", "--precision", "bf16-mixed", "--nproc-per-node", "2", "--log-dir", str(tmp_path)]
    done = loopwright("launch", "--ray", cluster.address, *options, "train.py", "--lr", "1", folder=tmp_path)
    for rank in range(2):
        assert (tmp_path / f"rank-{rank}").read_text() == "2 bf16-mixed --lr 1\n", done.stdout + done.stderr
    assert done.returncode == 1
    assert "[Rank 1 Error Snippet]" in done.stderr
    assert "ValueError: a bad sample" in done.stderr
    assert "Loopwright: in training_step, trainer.fit, stage train, epoch 0, step 5, batch 5" in done.stderr


LIGHTNING = """
import json, os
import lightning.pytorch as pl
import ray, torch
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch.utils.data import DataLoader, TensorDataset

class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
    def training_step(self, batch, batch_idx):
        loss = self.layer(batch[0]).pow(2).mean()
        self.log("loss", loss)
        return loss
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

def train(config):
    from ray.train.lightning import RayDDPStrategy, RayDeepSpeedStrategy, RayFSDPStrategy
    from ray.train.lightning import RayLightningEnvironment, RayTrainReportCallback, prepare_trainer
    for strategy in (RayFSDPStrategy(), RayDDPStrategy()):
        pl.seed_everything(1)
        trainer = pl.Trainer(
            max_epochs=2, devices="auto", accelerator="cpu", strategy=strategy, plugins=[RayLightningEnvironment()],
            callbacks=[RayTrainReportCallback()], enable_progress_bar=False, enable_checkpointing=False, logger=False,
        )
        trainer = prepare_trainer(trainer)
        trainer.fit(Net(), DataLoader(TensorDataset(torch.randn(32, 4)), batch_size=4))
        with open(f"{config['folder']}/{type(trainer.strategy).__name__}-{trainer.global_rank}", "w") as file:
            file.write(f"{trainer.world_size} {trainer.global_step}")

if __name__ == "__main__":
    folder = os.getcwd()
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=100_000_000)
    result = TorchTrainer(
        train, train_loop_config={"folder": folder}, scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=folder + "/store"),
    ).fit()
    print(json.dumps([result.metrics["epoch"], result.metrics["step"], os.listdir(result.checkpoint.path)]))
"""


def test_a_program_for_ray_train_lightning_runs_with_rays_own_classes(ray_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(LIGHTNING)
    done = loopwright("run-lightning", "train.py", folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == '[1, 8, ["checkpoint.ckpt"]]'
    found = {file.name: file.read_text() for file in tmp_path.glob("Ray*")}
    assert found == {f"Ray{name}Strategy-{rank}": "2 8" for name in ("DDP", "FSDP") for rank in (0, 1)}


def test_the_guides_program_runs(cluster: Any, tmp_path: Path) -> None:
    code = re.findall(r"```python no-run\n(import ray\n.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(code) == 1
    (tmp_path / "train.py").write_text(code[0].replace('RunConfig(name="net"', f'RunConfig(storage_path="{tmp_path}"'))
    variables = {**os.environ, "RAY_ADDRESS": cluster.address}
    command = [sys.executable, "train.py"]
    done = subprocess.run(
        command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "checkpoint_step_00000040" in done.stdout.splitlines()[-1]
