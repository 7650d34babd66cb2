"""Fills the environment of the comparisons with others: `python peers_environment.py`, with its own python.

LitGPT, TRL and Loopwright in one environment, beside the torch of constraints.txt. What cannot be installed ends it
with pip's reason.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LITGPT = "litgpt==0.5.13"


def own_dependencies() -> list[str]:
    """Return what Loopwright and its recipes need, but torch."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    listed = [*project["dependencies"], *project["optional-dependencies"]["recipes"]]
    return [one for one in listed if not one.startswith("torch>")]


def install(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments]
    if subprocess.run(command, check=False).returncode:
        sys.exit("the environment of the comparisons could not be built: " + " ".join(command))


def main() -> None:
    if sys.prefix == sys.base_prefix:
        sys.exit("call it with the python of the environment that is to be filled: .venv-peers/bin/python")
    requirements = Path(__file__).with_name("peers_requirements.txt")
    install("-c", str(ROOT / "constraints.txt"), "torch", "-r", str(requirements), *own_dependencies())
    install("--no-deps", LITGPT)
    site_packages = Path(sysconfig.get_path("purelib"))
    link = site_packages / "loopwright"
    link.unlink(missing_ok=True)
    link.symlink_to(os.path.relpath(ROOT, site_packages))
    check = "import litgpt.finetune.full, trl, loopwright"
    if subprocess.run([sys.executable, "-c", check], check=False).returncode:
        sys.exit("the environment of the comparisons was built, but its programs cannot be imported")


if __name__ == "__main__":
    main()
