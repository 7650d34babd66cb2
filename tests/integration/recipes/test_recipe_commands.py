"""Commands as a user types them: those of docs/recipes.md, and a training on two processes that is killed."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from recipe_runs import make_inputs

# Any in this file: JSON.

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = [sys.executable, "-m", "loopwright"]


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT.parent) + os.pathsep + ":".join(sys.path)}


def run(folder: Path, command: list[str], text: str = "") -> str:
    """Run a command and return what it prints."""
    done = subprocess.run(
        command, cwd=folder, input=text, capture_output=True, text=True, env=environment(), check=False, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_five_commands_of_the_documentation_lead_to_a_chat(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "recipes.md").read_text()
    program, commands = (re.search(rf"```{name}\n(.*?)```", page, re.DOTALL) for name in ("python", "bash"))
    assert program is not None
    assert commands is not None
    lines = commands[1].strip().splitlines()
    assert len(lines) == 5
    (tmp_path / "make_data.py").write_text(program[1])
    for line in lines[:-1]:
        # As on the page, but for the number of steps.
        words = shlex.split(re.sub(r"steps=\d+|epochs=\d+", "steps=2", line))
        run(tmp_path, [sys.executable, *words[1:]] if words[0] == "python" else [*PROGRAM, *words[1:]])
    answer = run(tmp_path, [*PROGRAM, *shlex.split(lines[-1])[1:]], "What does heapq.heappush do?\n")

    assert "Expected" not in answer
    assert re.search(r"^1 answer, [1-9]\d* tokens?", answer, re.MULTILINE)
    assert (tmp_path / "runs" / "chat" / "model" / "adapter_model.safetensors").is_file()


@pytest.mark.slow
def test_a_command_on_two_processes_that_was_killed_is_repeated(tmp_path: Path) -> None:
    inputs = make_inputs(tmp_path)
    command = [
        *PROGRAM, "recipe", "finetune", f"model={inputs / 'base'}", f"data={inputs / 'chats.jsonl'}", "out=run",
        "epochs=8", "max_length=64", "packing=false", "devices=2", "strategy=ddp", "micro_batch=1", "save_every=1",
        "trainer.accelerator=cpu", "trainer.enable_progress_bar=false",
    ]  # fmt: skip
    first = subprocess.Popen(command, cwd=tmp_path, env=environment(), start_new_session=True)
    until = time.monotonic() + 300
    while not (tmp_path / "run" / "checkpoints" / "last.ckpt").exists():
        assert first.poll() is None
        assert time.monotonic() < until
        time.sleep(0.05)
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    assert not (tmp_path / "run" / "report.json").exists()

    report: dict[str, Any] = json.loads(run(tmp_path, [*command, "--json"]))
    assert report["is_complete"]
    assert report["ranks"] == 2
    assert report["trained_tokens"] == 8 * report["data"]["trained_tokens"]
