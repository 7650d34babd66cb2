"""Fills the environment of the XLA tests: `python environment.py`, with the environment's own python.

torch 2.9 and torch_xla 2.9, without the CUDA libraries that their wheels ask for: about a gigabyte to download, 2.2 on
disk. Called by `make test-xla`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

from stub_cuda import build_stand_ins

ROOT = Path(__file__).resolve().parents[4]

# Without what they ask for: of the CUDA libraries only this one is real.
LEAN = ("torch==2.9.0", "torch_xla==2.9.0", "nvidia-cuda-runtime-cu12==12.8.90")
# What they need beside CUDA, and what the tests need.
REST = (
    "absl-py", "filelock", "fsspec", "jinja2", "networkx", "numpy", "psutil", "pytest", "pytest-timeout",
    "pytest-xdist", "pyyaml", "requests", "sympy", "typing-extensions",
)  # fmt: skip


def own_dependencies() -> list[str]:
    """Return what Loopwright needs, but torch."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [one for one in project["dependencies"] if not one.startswith("torch>")]


def install(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments]
    if subprocess.run(command, check=False).returncode:
        sys.exit("the environment for XLA could not be built: " + " ".join(command))


def main() -> None:
    if sys.prefix == sys.base_prefix:
        sys.exit("call it with the python of the environment that is to be filled: .venv-xla/bin/python")
    site_packages = Path(sysconfig.get_path("purelib"))
    install("--no-deps", *LEAN)
    install(*REST, *own_dependencies())
    build_stand_ins(site_packages)
    link = site_packages / "loopwright"
    link.unlink(missing_ok=True)
    link.symlink_to(os.path.relpath(ROOT, site_packages))
    check = "import torch_xla; assert torch_xla.device().type == 'xla'"
    environment = {**os.environ, "PJRT_DEVICE": "CPU"}
    if subprocess.run([sys.executable, "-c", check], env=environment, check=False).returncode:
        sys.exit("the environment for XLA was built, but torch_xla does not work in it")


if __name__ == "__main__":
    main()
