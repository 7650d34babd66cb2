"""Runs a task of tasks.py in a process of its own, with a number of XLA devices on the CPU, and a time limit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

__all__ = ["TIME_LIMIT_S", "run_task"]

TASKS = Path(__file__).with_name("tasks.py")
TIME_LIMIT_S = 800  # against a hang: beside other work a task takes several times its usual time


def run_task(folder: Path, task: str, devices: int, *arguments: Any, program: Path = TASKS) -> Any:
    """Return what the task returned; a process that fails or takes too long fails the test with all that it wrote.

    Args:
        folder: The test's own.
        task: Name of a function of `program`.
        devices: Its first argument.
        arguments: Its further arguments.
        program: Where the function is.
    """
    file = folder / f"{task}-{devices}"
    torch.save(arguments, file)
    environment = {
        **os.environ,
        "PJRT_DEVICE": "CPU",
        "TF_CPP_MIN_LOG_LEVEL": "2",  # else a line of XLA for each graph
        # Models are tiny, and compiling them is all the time there is: no optimization of machine code.
        "XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true",
        # The package under test may be one that PYTHONPATH names, before the installed one.
        "PYTHONPATH": os.pathsep.join(
            [
                str(TASKS.parents[2] / "support"),
                str(TASKS.parent / "support"),
                *os.environ.get("PYTHONPATH", "").split(),
            ]
        ),
        "PYTHONWARNINGS": "error::UserWarning:loopwright",
    }
    # Without them: the strategy is to find out, and to say, by itself.
    for name in ("CPU_NUM_DEVICES", "XLA_USE_SPMD"):
        environment.pop(name, None)
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", program, task, str(devices), file],
        env=environment, cwd=folder, timeout=TIME_LIMIT_S, check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, f"{task} on {devices} devices\n{done.stdout}\n{done.stderr}"
    return torch.load(f"{file}.out", weights_only=False)
