"""Runs programs as tutorials show them on Lightning and on Loopwright: the numbers and the files are the same.

`make test-lightning`. A Transformer with a data module and a schedule by step, a classifier with collections of metrics
in three stages that is resumed, and two models on Fabric.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

PROGRAMS = Path(__file__).with_name("programs")
PYTHON = os.environ.get("LIGHTNING_PYTHON", "")
SIDES = {"theirs": [PYTHON], "ours": [PYTHON, "-m", "loopwright", "run-lightning"]}
# What Loopwright leaves beside logs.
OWN_FILES = ("environment.json", "evaluation.json", "timeline.json")

pytestmark = pytest.mark.skipif(not PYTHON, reason="LIGHTNING_PYTHON names no interpreter with Lightning")


def run(side: str, name: str, folder: Path) -> Any:
    program = str(PROGRAMS / f"{name}.py")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [*SIDES[side], program, str(folder / side)]
    found = subprocess.run(
        command, cwd=folder, env=environment, text=True, capture_output=True, timeout=900, check=False
    )
    assert found.returncode == 0, found.stderr[-3000:]
    return without_own_files(json.loads([line for line in found.stdout.splitlines() if line.startswith("{")][-1]))


def without_own_files(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_own_files(one) for key, one in value.items()}
    if isinstance(value, list):
        return [without_own_files(one) for one in value if not (isinstance(one, str) and one.endswith(OWN_FILES))]
    return value


@pytest.mark.parametrize("name", ["language_model", "classifier", "two_models"])
def test_numbers_and_files_are_the_same(name: str, tmp_path: Path) -> None:
    theirs, ours = run("theirs", name, tmp_path), run("ours", name, tmp_path)
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        assert ours[key] == value, key
