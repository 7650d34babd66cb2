"""benchmarks/run.py measures every part; the numbers themselves are never asserted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "benchmarks" / "run.py"


# The parts that start many processes run by themselves: together they take longer than one test may.
GROUPS = {
    "one-process": "steps,calls,growth,reads,imports,first-step,saving,logging,memory,compiling,xla",
    "data-and-small-saves": "loading,small-saves,stalls,surviving",
    "ranks": "ranks,launch,rank-growth,many-ranks,fsdp,sharded-saves,deepspeed",
    "mesh": "mesh",
    "recipes": "recipes,recipes-memory,peers",
}


def quick_run(folder: Path, parts: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--quick", "--output", str(folder), "--only", parts],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "EXCEPT" not in (folder / "RESULTS.md").read_text()
    results: dict[str, Any] = json.loads((folder / "results" / "latest.json").read_text())
    return results


@pytest.mark.slow
def test_the_groups_are_all_parts() -> None:
    refused = subprocess.run([sys.executable, str(SCRIPT), "--only", "?"], capture_output=True, text=True, check=False)
    parts = refused.stderr.split("use some of ")[1].split()
    assert sorted(",".join(GROUPS.values()).split(",")) == sorted(part.strip(",") for part in parts)


@pytest.mark.slow
@pytest.mark.parametrize("group", GROUPS)
def test_quick_run_writes_every_section(group: str, tmp_path: Path) -> None:
    parts = GROUPS[group].split(",")
    results = quick_run(tmp_path, GROUPS[group])
    assert set(parts) <= set(results)
    assert all(row["weights_equal"] for part in {"steps", "ranks"} & set(parts) for row in results[part])
    if "recipes-memory" in parts:
        for row in results["recipes-memory"]["rows"]:
            assert row["state"] == pytest.approx(row["plan"]["state"], rel=0.01), row["case"]
            # Activations are an estimate.
            assert row["peak"] == pytest.approx(sum(row["plan"].values()), rel=0.25), row["case"]
    if "memory" not in parts:
        return
    # Bytes of live tensors are exact, however busy the machine is; two ranks.
    bytes_per_parameter = {"single": 16, "fsdp FULL_SHARD": 8, "deepspeed 2": 12, "deepspeed 3": 10}
    rows = {row["name"]: row for row in results["memory"]["rows"]}
    assert {name: row["before_step_bytes"] / row["elements"] for name, row in rows.items()} == pytest.approx(
        bytes_per_parameter, rel=0.06
    )


@pytest.mark.slow
def test_parts_that_are_left_out_keep_their_numbers_if_the_machine_is_the_same(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--quick", "--output", str(tmp_path), "--only"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([*command, "reads"], env=environment, capture_output=True, check=True)
    file = tmp_path / "results" / "latest.json"
    first = json.loads(file.read_text())
    subprocess.run([*command, "calls"], env=environment, capture_output=True, check=True)
    second = json.loads(file.read_text())
    assert second["reads"] == first["reads"]
    assert second["when"]["reads"] == first["when"]["reads"]
    assert "calls" in second
    file.write_text(json.dumps({**second, "environment": {**second["environment"], "torch": "1.0"}}))
    subprocess.run([*command, "calls"], env=environment, capture_output=True, check=True)
    assert "reads" not in json.loads(file.read_text())
