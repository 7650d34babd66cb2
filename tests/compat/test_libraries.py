"""Runs first examples of libraries that are built on Lightning, on both: `make test-compat`.

Each program in programs/ trains with such a library and prints one line of JSON; all numbers in it must agree.
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
LIBRARIES = (
    "forecasting",
    "series",
    "probabilistic",
    "self_supervised",
    "tables",
    "neural",
    "molecules",
    "pruning",
    "uncertainty",
    "finetuning",
)

pytestmark = [
    pytest.mark.libraries,
    pytest.mark.skipif(not PYTHON, reason="LIGHTNING_PYTHON names no interpreter with Lightning"),
]

# Means over an epoch are added up in float64 here and in float32 there, so that their last digit may differ.
TOLERANCE = 1e-6


def leaves(value: Any, path: str = "") -> dict[str, Any]:
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if entries is None:
        return {path: value}
    return {name: leaf for key, below in entries for name, leaf in leaves(below, f"{path}.{key}").items()}


def printed(command: list[str], folder: Path) -> dict[str, Any]:
    folder.mkdir()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    found = subprocess.run(
        command, cwd=folder, env=environment, text=True, capture_output=True, timeout=900, check=False
    )
    assert found.returncode == 0, found.stderr[-4000:]
    return leaves(json.loads([line for line in found.stdout.splitlines() if line.startswith("{")][-1]))


def agree(ours: Any, theirs: Any) -> bool:
    is_number = isinstance(theirs, int | float) and not isinstance(theirs, bool)
    return bool(ours == (pytest.approx(theirs, rel=TOLERANCE) if is_number else theirs))


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_library_gives_the_same_numbers_on_both(library: str, tmp_path: Path) -> None:
    program = str(PROGRAMS / f"{library}.py")
    theirs = printed([PYTHON, program], tmp_path / "theirs")
    ours = printed([PYTHON, "-m", "loopwright", "run-lightning", program], tmp_path / "ours")
    assert ours.keys() == theirs.keys()
    wrong = {name: (ours[name], value) for name, value in theirs.items() if not agree(ours[name], value)}
    assert not wrong, wrong
