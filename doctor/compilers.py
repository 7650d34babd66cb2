"""Compilers, which torch.compile and DeepSpeed's compiled operators need."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator

from .finding import Finding, Level

_SECTION = "compilers"


def examine() -> Iterator[Finding]:
    """Yield findings about compilers on the path."""
    name = os.environ.get("CXX", "g++")
    yield _tool(
        "C++",
        name,
        "torch.compile on the CPU and DeepSpeed's operators need it",
        "install g++ (Debian: apt install g++)",
    )
    yield _tool("ninja", "ninja", "DeepSpeed's operators need it", "pip install ninja")
    import torch

    if torch.version.cuda:
        yield _tool(
            "CUDA", "nvcc", "DeepSpeed's operators for GPUs need it", f"install the CUDA toolkit {torch.version.cuda}"
        )


def _tool(title: str, name: str, use: str, advice: str) -> Finding:
    path = shutil.which(name)
    if path is None:
        return Finding(_SECTION, title, f"{name} is missing: {use}", Level.NOTE, advice)
    try:
        said = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20, check=False).stdout
    except subprocess.TimeoutExpired:
        return Finding(_SECTION, title, f"{path} does not answer", Level.WARNING, advice)
    lines = [line for line in said.splitlines() if line.strip()]
    return Finding(_SECTION, title, lines[-1] if name == "nvcc" and lines else lines[0] if lines else path)
