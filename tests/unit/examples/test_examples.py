"""The examples run as a user runs them, with small settings; examples/."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


def run(folder: Path, script: str, *arguments: str) -> str:
    """Run an example in an empty folder, with warnings as errors, and return what it printed."""
    done = subprocess.run(
        [sys.executable, "-W", "error", str(EXAMPLES / script), *arguments],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_gpt_trains_resumes_and_knows_when_it_is_done(tmp_path: Path) -> None:
    small = ("--batch-size", "64")
    first = run(tmp_path, "gpt/train.py", "--steps", "2", *small)
    assert "bits per byte" in first
    second = run(tmp_path, "gpt/train.py", "--steps", "4", *small)
    assert "Resuming at step 2 of 4" in second
    third = run(tmp_path, "gpt/train.py", "--steps", "4", *small)
    assert "has finished its 4 steps" in third
    assert (tmp_path / "runs" / "gpt" / "csv" / "version_0" / "metrics.csv").exists()


@pytest.mark.slow
def test_digits_reaches_97_percent(tmp_path: Path) -> None:
    printed = run(tmp_path, "digits.py")
    accuracy = re.search(r"Test accuracy: ([0-9.]+)%", printed)
    assert accuracy is not None
    assert float(accuracy.group(1)) > 97.0


def test_plain_module_finds_the_line(tmp_path: Path) -> None:
    assert "y = 3.000 x + 2.000" in run(tmp_path, "plain_module.py")


@pytest.mark.slow
def test_gan_finds_the_ring(tmp_path: Path) -> None:
    printed = run(tmp_path, "gan.py")
    radius = re.search(r"radius of 1,000 generated points: ([0-9.]+)", printed)
    assert radius is not None
    assert float(radius.group(1)) == pytest.approx(1.0, abs=0.2)


@pytest.mark.slow
def test_digits_are_configured_by_a_file_and_tested_from_the_checkpoint_alone(tmp_path: Path) -> None:
    settings = ("trainer.max_epochs=2", "trainer.logger=csv", "model.lr=1e-3", "data.batch_size=64")
    run(tmp_path, "digits_cli.py", "fit", "--config", str(EXAMPLES / "digits.yaml"), *settings)
    last = next((tmp_path / "runs" / "digits").rglob("last.ckpt"))
    assert "batch_size: 64" in (last.parent / "config.yaml").read_text()
    printed = run(tmp_path, "digits_cli.py", "test", "--ckpt_path", str(last))
    accuracy = re.search(r"test_acc +([0-9.]+)", printed)
    assert accuracy is not None
    assert float(accuracy.group(1)) > 0.8


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [(), ("--strategy", "mesh:fsdp=2,ep=2", "--devices", "2")], ids=["one", "ep"])
def test_experts_learn_on_one_process_and_on_two(arguments: tuple[str, ...], tmp_path: Path) -> None:
    batch = "16" if arguments else "32"  # for each process
    printed = run(tmp_path, "mixture_of_experts.py", "--steps", "40", "--batch-size", batch, *arguments)
    bits = re.search(r"([0-9.]+) bits per byte", printed)
    assert bits is not None
    assert float(bits.group(1)) < 5.0
