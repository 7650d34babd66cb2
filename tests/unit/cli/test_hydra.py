"""Loopwright under Hydra itself, and on the OmegaConf that Hydra asks for: `make test-slow` puts both into a folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[2]
HYDRA = TESTS.parent / ".venv" / "hydra"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (HYDRA / "hydra").is_dir(), reason="no Hydra: make .venv/hydra/installed"),
]


def typed(folder: Path, *command: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{HYDRA}{os.pathsep}{TESTS}"}
    done = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        env=environment,
        cwd=folder,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_hydra_makes_trainer_model_and_callbacks(tmp_path: Path) -> None:
    program = str(TESTS / "fixtures" / "hydra" / "program.py")
    assert "omegaconf 2.3, 1 ranks, 4 steps, ListConfig [1, 2]" in typed(tmp_path, program, "trainer.max_epochs=1")
    # The other rank is this program again, with the same overrides; it writes no output folder of its own.
    said = typed(tmp_path, program, "trainer.devices=2", "trainer.strategy=ddp", "hydra.run.dir=two", "model.width=3")
    assert "2 ranks, 4 steps" in said
    assert len(list(tmp_path.rglob(".hydra"))) == 2
    assert len(list((tmp_path / "two").rglob("*.ckpt"))) == 1


def test_each_job_of_a_sweep_starts_processes_of_its_own(tmp_path: Path) -> None:
    program = str(TESTS / "fixtures" / "hydra" / "program.py")
    said = typed(
        tmp_path, program, "-m", "trainer.strategy=ddp", "trainer.devices=2,2,1", "trainer.max_epochs=1",
        "hydra.sweep.dir=sweep",
    )  # fmt: skip
    assert said.count("2 ranks, 2 steps") == 2
    assert said.count("1 ranks, 4 steps") == 1
    assert len(list((tmp_path / "sweep").glob("*/ckpt/*.ckpt"))) == 3


def test_the_command_line_works_on_the_omegaconf_of_hydra(tmp_path: Path) -> None:
    said = typed(
        tmp_path, "-m", "loopwright", "fit", "--model", "fixtures.cli.cli_program.Net", "--print-config=short",
        "model.lr=${model.width}", r"model.name=\${x}", "model.width=3",
    )  # fmt: skip
    assert "lr: 3" in said
    assert r"name: \${x}" in said
