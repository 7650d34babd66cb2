"""benchmarks/resources.py fills its table on this machine."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.slow
def test_the_table_has_a_row_for_each_number_of_devices(tmp_path: Path) -> None:
    file = tmp_path / "RESOURCES.md"
    command = [sys.executable, ROOT / "benchmarks" / "resources.py", "--models", "vit-0.1m", "--devices", "1", "2"]
    subprocess.run([*command, "--steps", "2", "--output", file], check=True, capture_output=True, cwd=tmp_path)
    one, two = (line.split(" | ") for line in file.read_text().splitlines() if line.startswith("| vit"))
    assert (one[:4], two[:4]) == (["| vit-0.1m", "0.1 M", "1", "none"], ["| vit-0.1m", "0.1 M", "2", "ddp"])
    for row in (one, two):
        assert float(row[6].replace(",", "")) > 0
        assert 0.05 < float(re.sub(r"[^\d.]", "", row[7])) < 5  # GB
