"""benchmarks/accelerator/: what it does without a device, and that all its parts run, in small, on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
SCRIPT = BENCHMARKS / "accelerator" / "run.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Any:
    # At the end: names there may be those of test support.
    monkeypatch.setattr(sys, "path", [*sys.path, str(BENCHMARKS)])
    from accelerator import run as program

    return program


def test_without_a_device_nothing_is_written_and_the_exit_code_says_so(tmp_path: Path) -> None:
    done = run("--output", str(tmp_path))
    assert done.returncode == 77
    assert "nothing was measured" in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_all_parts_run_on_the_cpu_and_what_can_be_held_there_holds(tmp_path: Path) -> None:
    done = run("--device", "cpu", "--output", str(tmp_path))
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "GPU.md").read_text()
    assert "no accelerator" in text
    assert text.count("| yes |") == 3  # tests were found; fsdp and fp16 equal the handwritten loop
    for what in ("host reads", "a step, eager", "GPT with", "peak memory", "pinned", "a save of"):
        assert what in text


@pytest.mark.parametrize(
    ("rows", "why", "code"), [([True, None], "", 0), ([True, False], "", 1), ([True], "failed with exit code 3", 1)]
)
def test_a_part_that_fails_or_does_not_hold_is_no_success(
    rows: list[bool | None], why: str, code: int, tmp_path: Path, program: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [program.Row("a", "b", "c", holds) for holds in rows]
    monkeypatch.setattr(program, "run_part", lambda *arguments: (found, why))
    arguments = ["run.py", "--device", "cpu", "--output", str(tmp_path), "--only", "steps"]
    monkeypatch.setattr(sys, "argv", arguments)
    assert program.main() == code
    text = (tmp_path / "GPU.md").read_text()
    assert (False in rows) == ("**no** |" in text)
    assert not why or f"- steps: {why}" in text
