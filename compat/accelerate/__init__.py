"""Provides Loopwright under Hugging Face Accelerate's names. Users call `install()`; in child processes, ../site does.

    from loopwright.compat.accelerate import install
    install()
    from accelerate import Accelerator  # on lw.Fabric

names.py lists the names and their homes; docs/from-accelerate.md lists what differs.
"""

from __future__ import annotations

import os
import sys

from ...errors import ConfigError
from .. import leave_site, with_site
from .finder import AccelerateFinder
from .names import VERSION

__all__ = ["ACCELERATE_VERSION", "AccelerateFinder", "child_environment", "install", "is_installed", "uninstall"]

ACCELERATE_VERSION = VERSION

# Read by compat/site/sitecustomize.py in child processes.
SWITCH = "LOOPWRIGHT_COMPAT_ACCELERATE"


def install(*, children: bool = True) -> None:
    """Let `accelerate` and its submodules be Loopwright from here on; calling it again changes nothing.

    Accelerate may be installed or not; its own modules are not touched.

    Args:
        children: Whether Python processes that this one starts do the same, through environment variables.

    Raises:
        ConfigError: A module of Accelerate itself was imported before.
    """
    before = [name for name in _loaded() if not _is_ours(name)]
    if before:
        raise ConfigError(
            f"{min(before)!r} and {len(before) - 1} more modules of Accelerate itself are imported already.",
            fix="call loopwright.compat.accelerate.install() before the first import of accelerate, and before "
            "libraries that import it; or start the program with `loopwright run-accelerate`.",
        )
    if not is_installed():
        sys.meta_path.insert(0, AccelerateFinder())
    if children:
        os.environ.update(child_environment(os.environ.get("PYTHONPATH", "")))


def uninstall() -> None:
    """Undo `install`; modules that are imported already keep what they have."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, AccelerateFinder)]
    for name in [name for name in _loaded() if _is_ours(name)]:
        del sys.modules[name]
    leave_site(SWITCH)


def is_installed() -> bool:
    """Return whether Accelerate's names are Loopwright's in this process."""
    return any(isinstance(finder, AccelerateFinder) for finder in sys.meta_path)


def child_environment(python_path: str) -> dict[str, str]:
    """Return the environment variables with which a Python process calls `install` at its start.

    Args:
        python_path: The current PYTHONPATH; its folders follow ours.
    """
    return {SWITCH: "1", "PYTHONPATH": with_site(python_path)}


def _loaded() -> list[str]:
    return [name for name in sys.modules if name.split(".")[0] == "accelerate"]


def _is_ours(name: str) -> bool:
    return isinstance(getattr(sys.modules[name], "__loader__", None), AccelerateFinder)
