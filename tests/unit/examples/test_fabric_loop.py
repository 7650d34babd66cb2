"""examples/fabric_loop.py as a user runs it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "fabric_loop.py"


def run(folder: Path, *arguments: str) -> str:
    """Run the example in a folder, with warnings as errors, and return what it printed."""
    done = subprocess.run(
        [sys.executable, "-W", "error", str(EXAMPLE), *arguments],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=250,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def accuracy_of(printed: str) -> float:
    match = re.search(r"([0-9.]+)% of 301 new points correct", printed)
    assert match is not None, printed
    return float(match.group(1))


@pytest.mark.slow
def test_the_spirals_are_classified_and_a_run_resumes(tmp_path: Path) -> None:
    first = run(tmp_path, "--epochs", "5")
    assert "Resuming" not in first
    second = run(tmp_path, "--epochs", "10")
    assert "Resuming in epoch 6." in second
    assert accuracy_of(second) > 95


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "ddp_spawn"])
def test_two_processes_learn_as_one(strategy: str, tmp_path: Path) -> None:
    printed = run(tmp_path, "--epochs", "10", "--devices", "2", "--strategy", strategy, "--accumulate", "1")
    assert printed.count("epoch  10") == 1  # only rank 0 prints
    assert accuracy_of(printed) > 95


@pytest.mark.slow
# With three ranks, torch rearranges its buckets after the first step, which changes how sums are rounded, unless it
# looks for unused parameters.
@pytest.mark.parametrize(
    ("size", "strategy"), [(1, "auto"), (2, "ddp_fork"), (3, "ddp_fork_find_unused_parameters_true")]
)
def test_a_resumed_run_has_the_bits_of_one_that_was_not_stopped(size: int, strategy: str, tmp_path: Path) -> None:
    processes = ("--devices", str(size), "--strategy", strategy)
    for file, epochs in (("two.ckpt", 10), ("two.ckpt", 20), ("one.ckpt", 20)):
        run(tmp_path, "--epochs", str(epochs), "--file", file, *processes)
    one, two = (torch.load(tmp_path / f"{name}.ckpt", weights_only=True) for name in ("one", "two"))
    assert len(one["rng"].get("ranks", [None])) == size
    for name, value in one["model"].items():
        assert torch.equal(value, two["model"][name]), name
