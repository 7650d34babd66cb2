"""benchmarks/run.py measures every part; the numbers themselves are never asserted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "benchmarks" / "run.py"


@pytest.mark.slow
def test_quick_run_writes_every_section(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--quick", "--output", str(tmp_path)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "results" / "latest.json").read_text())
    assert {"steps", "calls", "reads", "imports", "first-step", "saving", "logging", "ranks", "launch"} <= set(results)
    assert {"fsdp", "mesh", "deepspeed", "sharded-saves", "xla", "memory", "compiling"} <= set(results)
    assert all(row["weights_equal"] for part in ("steps", "ranks") for row in results[part])
    # Bytes of live tensors are exact, however busy the machine is; two ranks.
    bytes_per_parameter = {"single": 16, "fsdp FULL_SHARD": 8, "deepspeed 2": 12}
    rows = {row["name"]: row for row in results["memory"]["rows"]}
    assert {name: row["before_step_bytes"] / row["elements"] for name, row in rows.items()} == pytest.approx(
        bytes_per_parameter, rel=0.05
    )
    assert "EXCEPT" not in (tmp_path / "RESULTS.md").read_text()
