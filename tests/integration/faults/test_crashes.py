"""A rank or a loader worker that a fatal signal ends is reported with its Python stack, whoever started it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

PROGRAM = """
import ctypes, os, sys, time
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset
import loopwright as lw

kind, strategy, who = sys.argv[1], sys.argv[2], int(sys.argv[3])


class Data(Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, index):
        if kind == "worker" and index == 17:
            ctypes.string_at(0)
        return torch.ones(4)


class Net(lw.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        if batch_idx == 2:
            rank = self.trainer.global_rank
            if kind == "mismatch":
                dist.all_reduce(torch.ones(1000 if rank == who else 10))
            if kind == "segv" and rank == who:
                ctypes.string_at(0)
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


if __name__ == "__main__":
    trainer = lw.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )
    trainer.fit(Net(), DataLoader(Data(), batch_size=4, num_workers=kind == "worker"))
"""


def run(folder: Path, kind: str, strategy: str, who: int, *, launcher: tuple[str, ...] = ()) -> str:
    """Return what all processes print to their standard error."""
    script = folder / "crashing.py"
    script.write_text(PROGRAM)
    command = [sys.executable, *launcher, str(script), kind, strategy, str(who)]
    # A short path: loader workers send tensors through sockets below it, whose paths are limited to 107 characters.
    with tempfile.TemporaryDirectory(prefix="lw") as short:
        variables = {**os.environ, "TMPDIR": short, "OMP_NUM_THREADS": "1"}
        variables.pop("PYTHONFAULTHANDLER", None)
        done = subprocess.run(command, capture_output=True, timeout=120, check=False, env=variables)
        (folder / "left").write_text("\n".join(os.listdir(short)))
    assert done.returncode != 0
    return done.stderr.decode(errors="replace")


def line_of(function: str) -> dict[str, str]:
    """Return what a stack shows of the lines in a function that crash."""
    lines = PROGRAM.splitlines()
    begin = next(n for n, line in enumerate(lines) if f"def {function}(" in line)
    marks = ["all_reduce", "string_at"] if function == "training_step" else ["string_at"]
    found = {mark: next(n for n in range(begin, len(lines)) if f"{mark}(" in lines[n]) + 1 for mark in marks}
    return {mark: f'crashing.py", line {number} in {function}' for mark, number in found.items()}


TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone")


@pytest.mark.parametrize(
    ("strategy", "launcher"),
    [
        pytest.param("ddp", TORCHRUN, marks=pytest.mark.slow),
        ("ddp_fork", ()),
        pytest.param("ddp", (), marks=pytest.mark.slow),
        pytest.param("ddp_spawn", (), marks=pytest.mark.slow),
    ],
)
def test_a_mismatched_all_reduce_shows_the_line_that_called_it(
    tmp_path: Path, strategy: str, launcher: tuple[str, ...]
) -> None:
    # gloo aborts the rank that gets more than it expects; the other one, or the launcher, reports.
    said = run(tmp_path, "mismatch", strategy, 0, launcher=launcher)
    assert "RankFailure: rank 1 (host" in said
    assert "Fatal Python error: Aborted" in said
    report = said[said.index("--- traceback of rank 1 ---") :]
    assert line_of("training_step")["all_reduce"] in report
    assert "loopwright-crash-" not in (tmp_path / "left").read_text()


def test_a_rank_that_a_signal_ended_is_reported(tmp_path: Path) -> None:
    said = run(tmp_path, "segv", "ddp", 1)
    assert "RankFailure: rank 1 (host" in said
    assert "Fatal Python error: Segmentation fault" in said
    report = said[said.index("--- traceback of rank 1 ---") :]
    assert line_of("training_step")["string_at"] in report


@pytest.mark.slow
def test_the_rank_that_started_the_others_says_so_itself(tmp_path: Path) -> None:
    said = run(tmp_path, "segv", "ddp", 0)
    assert "Fatal Python error: Segmentation fault" in said
    assert line_of("training_step")["string_at"] in said


@pytest.mark.slow
def test_a_loader_worker_that_a_signal_ended_shows_its_stack(tmp_path: Path) -> None:
    said = run(tmp_path, "worker", "ddp_fork", 0)
    # torch's own line is not asked for: the socket of the dead worker can close before the system reports its end.
    assert "such as a loader worker, crashed: Fatal Python error: Segmentation fault" in said
    assert line_of("__getitem__")["string_at"] in said
    assert "stage train" in said
