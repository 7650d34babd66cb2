"""Versions of packages, and whether engines import. Called by examination.py.

Engines are imported in processes of their own: a broken one may end its process, or take minutes.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata

from .finding import Finding, Level

__all__ = ["Optional", "examine", "judge_needed", "judge_optional", "judge_torch"]

_SECTION = "packages"
_OLDEST_TORCH, _NEWEST_TORCH = (2, 9), (2, 13)


@dataclass(frozen=True)
class Optional:
    """A package that not every run needs, what it gives, and how it is installed."""

    package: str
    gives: str
    install: str
    has_engine: bool = False


_OPTIONAL = (
    Optional("deepspeed", 'strategy="deepspeed"', "pip install 'loopwright[deepspeed]'", has_engine=True),
    Optional("torch_xla", 'strategy="xla"', "pip install torch==2.9.0 torch_xla==2.9.0", has_engine=True),
    Optional("wandb", "WandbLogger", "pip install 'loopwright[wandb]'"),
    Optional("mlflow", "MLFlowLogger", "pip install mlflow"),
    Optional("torchmetrics", "metrics in self.log", "pip install torchmetrics"),
    Optional("torchdata", "StatefulDataLoader", "pip install torchdata"),
    Optional("plotly", "loopwright report", "pip install 'loopwright[report]'"),
)


def examine(timeout_s: float) -> Iterator[Finding]:
    """Give findings about packages; the import of an engine is ended after `timeout_s` seconds."""
    from .. import __version__

    yield Finding(_SECTION, "loopwright", __version__)
    yield judge_torch(metadata.version("torch"))
    for requirement in metadata.requires("loopwright") or []:
        if "extra ==" not in requirement and not requirement.startswith("torch>"):
            yield judge_needed(requirement)
    for optional in _OPTIONAL:
        yield judge_optional(optional, timeout_s)


def judge_torch(version: str) -> Finding:
    """Return whether Loopwright is tested with this version of torch."""
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    oldest, newest = (".".join(map(str, one)) for one in (_OLDEST_TORCH, _NEWEST_TORCH))
    if numbers < _OLDEST_TORCH:
        return Finding(_SECTION, "torch", f"{version} is too old", Level.PROBLEM, f"pip install 'torch>={oldest}'")
    if numbers > _NEWEST_TORCH:
        value = f"{version}, newer than what is tested ({oldest} to {newest})"
        return Finding(_SECTION, "torch", value, Level.NOTE, "look for a newer Loopwright if something fails")
    return Finding(_SECTION, "torch", version)


def judge_needed(requirement: str) -> Finding:
    """Return whether a package that every run needs is there, in a version that fits."""
    from packaging.requirements import Requirement

    needed = Requirement(requirement)
    found = _version(needed.name)
    if found is None:
        return Finding(_SECTION, needed.name, "missing", Level.PROBLEM, f"pip install '{requirement}'")
    if not needed.specifier.contains(found, prereleases=True):
        return Finding(
            _SECTION,
            needed.name,
            f"{found}, but {needed.specifier} is needed",
            Level.PROBLEM,
            f"pip install '{requirement}'",
        )
    return Finding(_SECTION, needed.name, found)


def judge_optional(optional: Optional, timeout_s: float) -> Finding:
    """Return whether a package is there and, if it is an engine, imports within `timeout_s` seconds."""
    found = _version(optional.package)
    if found is None:
        return Finding(_SECTION, optional.package, f"missing ({optional.gives})", Level.NOTE, optional.install)
    if not optional.has_engine:
        return Finding(_SECTION, optional.package, found)
    problem = _why_not_importable(optional.package, timeout_s)
    if problem is None:
        return Finding(_SECTION, optional.package, f"{found}, imports")
    value = f"{found}, cannot be imported: {problem}"
    return Finding(
        _SECTION, optional.package, value, Level.PROBLEM, f"{optional.install}, or pip uninstall {optional.package}"
    )


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _why_not_importable(package: str, timeout_s: float) -> str | None:
    try:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", f"import {package}"],
            capture_output=True, text=True, timeout=timeout_s, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"it takes longer than {timeout_s:g} s"
    if done.returncode == 0:
        return None
    said = [line for line in done.stderr.splitlines() if line.strip()]
    return said[-1].strip() if said else f"its process ended with code {done.returncode}"
