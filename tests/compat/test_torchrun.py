"""Runs a program on two processes, started in every possible way, and on Lightning: `make test-lightning`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PYTHON = os.environ.get("LIGHTNING_PYTHON", "")
PROGRAMS = Path(__file__).with_name("programs")
SCRIPT = str(PROGRAMS / "two_ranks.py")
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
OURS = ["-m", "loopwright", "run-lightning"]
LOOPWRIGHT = str(Path(PYTHON or sys.executable).with_name("loopwright"))

pytestmark = pytest.mark.skipif(not PYTHON, reason="LIGHTNING_PYTHON names no interpreter with Lightning")

WAYS = {
    "torchrun starts the command": [*TORCHRUN, "--no-python", LOOPWRIGHT, "run-lightning", SCRIPT],
    "torchrun starts python -m": [*TORCHRUN, *OURS, SCRIPT],
    "torchrun, and a module": [*TORCHRUN, *OURS, "-m", "two_ranks"],
    "the command starts torchrun": [*OURS, *TORCHRUN, SCRIPT],
    "the strategy starts a module": [*OURS, "-m", "two_ranks"],
}


def printed(*command: str) -> dict[str, Any]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    found = subprocess.run(
        [PYTHON, *command, "--width", "3"],
        cwd=PROGRAMS,
        env=environment,
        text=True,
        capture_output=True,
        timeout=900,
        check=False,
    )
    assert found.returncode == 0, found.stderr[-3000:]
    lines = [line for line in found.stdout.splitlines() if line.startswith("{")]
    assert len(lines) == 1, found.stdout
    return json.loads(lines[0])  # type: ignore[no-any-return]


def test_two_ranks_print_the_numbers_of_lightning_however_they_were_started() -> None:
    theirs = printed(*TORCHRUN, SCRIPT)
    assert (theirs["world_size"], theirs["arguments"]) == (2, ["--width", "3"])
    for way, command in WAYS.items():
        ours = printed(*command)
        numbers = {name: pytest.approx(value, abs=1e-6) for name, value in theirs.items() if name != "arguments"}
        assert ours == {**numbers, "arguments": theirs["arguments"]}, way
