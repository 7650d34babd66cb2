"""Examination of a machine: all checks in turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from . import compilers, devices, disk, machine, network, packages
from .finding import Finding, Level

_NEED_TORCH = ("devices", "compilers", "processes")
_REINSTALL = "pip install --force-reinstall torch, in the build for this machine (pytorch.org, 'Get started')"


def examine(folder: Path, *, disk_bytes: int = 256 << 20, timeout_s: float = 60.0) -> Iterator[Finding]:
    """Examine this machine, and yield findings one by one.

    Args:
        folder: Where checkpoints are to go; its disk is measured. If it does not exist, it is made and removed again.
        disk_bytes: Bytes that are written and read there; 0 leaves the measurement out.
        timeout_s: Maximum time for the import of one package.
    """
    parts: list[tuple[str, Callable[[], Iterator[Finding]]]] = [
        ("machine", machine.examine),
        ("devices", devices.examine),
        ("packages", lambda: packages.examine(timeout_s)),
        ("compilers", compilers.examine),
        ("processes", network.examine),
        ("disk", lambda: disk.examine(folder, disk_bytes)),
    ]
    why = _why_no_torch()
    for section, part in parts:
        if why is not None and section in _NEED_TORCH:
            if section == "devices":
                yield Finding(section, "torch", f"cannot be imported: {why}", Level.PROBLEM, _REINSTALL)
            continue
        try:
            yield from part()
        except Exception as error:  # the other parts are still examined, and the error is a finding
            yield Finding(
                section,
                "this part",
                f"could not be examined: {type(error).__name__}: {error}",
                Level.WARNING,
                "please report this in Loopwright's issue tracker",
            )


def _why_no_torch() -> str | None:
    """Return why torch cannot be imported; None where it can."""
    try:
        import torch  # noqa: F401
    except Exception as error:  # a system library that is missing or too old is an OSError
        return f"{type(error).__name__}: {error}"
    return None
