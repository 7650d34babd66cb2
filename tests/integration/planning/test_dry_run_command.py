"""`loopwright plan --dry-run`: what a start of a program on many ranks would refuse."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import torch
import loopwright as lw
from loopwright.strategies.mesh import MeshStrategy

class Net(lw.Module):
    def configure_model(self):
        self.layer = torch.nn.Linear(32, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())

data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn({samples}, 32)), batch_size=4)
trainer = lw.Trainer(strategy={strategy}, devices=8, num_nodes=64, accelerator="gpu", max_epochs=1)
trainer.fit(Net(), data)
raise SystemExit("nothing may run after fit")
"""


@pytest.mark.parametrize(
    ("strategy", "samples", "code", "said"),
    [
        (
            "'ddp'",
            4100,
            0,
            [
                "ranks 0, 511",
                "trains a step",
                "2 batches an epoch for each of 512",
                "uneven data",
                "about 396 B with Adam",
            ],
        ),
        ("'ddp'", 400, 1, ["X data", "100 batches for 512 ranks"]),
        pytest.param(
            "MeshStrategy(fsdp=3, tp=2)",
            4100,
            1,
            ["X ranks 0, 511", "(3 x 2), got 512", "-> pass devices="],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_start_on_512_ranks_is_checked_on_one_machine(
    strategy: str, samples: int, code: int, said: list[str], tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(PROGRAM.format(strategy=strategy, samples=samples))
    command = [
        sys.executable,
        "-m",
        "loopwright",
        "plan",
        "--dry-run",
        "--devices",
        "8",
        "--num-nodes",
        "64",
        "train.py",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    for text in (*said, "a checkpoint", "versions"):
        assert text in done.stdout, text
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]
