"""The environment of a run: machine, devices, versions, source revision; written when it begins, read by runs.py."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from functools import cache
from pathlib import Path

from ..files import replace_file

ENVIRONMENT_FILE = "environment.json"
_PACKAGES = ("loopwright", "torch", "numpy", "deepspeed", "torch_xla")


def describe_environment() -> dict[str, str]:
    """Return name to text: host, system, processor, GPUs, versions, script and the revision of its git repository.

    Neither environment variables nor the script's arguments are in it: both may hold secrets.
    """
    found = {
        "host": platform.node(),
        "system": platform.platform(),
        "processor": f"{_processor()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
    }
    for package in _PACKAGES:
        module = sys.modules.get(package)  # a package that was not imported did not affect the run
        if module is not None and hasattr(module, "__version__"):
            found[package] = str(module.__version__)
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
        found["GPUs"] = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
        found["CUDA"] = str(torch.version.cuda)
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    if script:
        found["script"] = os.path.abspath(script)
    commit = revision(os.path.dirname(os.path.abspath(script)) if script else os.getcwd())
    if commit:
        found["revision"] = commit
    return found


def write_environment(folder: str | os.PathLike[str]) -> Path:
    """Write `environment.json` into a run's folder, where `loopwright report` finds it; called on rank zero.

    Returns:
        The file's path.
    """
    path = Path(folder, ENVIRONMENT_FILE)
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, json.dumps(describe_environment(), indent=2) + "\n")
    return path


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass  # another system than Linux
    return platform.processor() or platform.machine()


@cache  # git looks at every file for it
def revision(folder: str) -> str | None:
    """Return the commit, with `+changes` if files differ from it; None outside of a repository, or without git."""
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--abbrev=12", "--dirty=+changes", "--exclude=*"],
            cwd=folder, capture_output=True, text=True, timeout=5, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None
