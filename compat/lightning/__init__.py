"""Provides Loopwright under Lightning's names. Users call `install()`; in child processes, ../site does.

    from loopwright.compat.lightning import install
    install()
    import lightning as L  # Loopwright, under Lightning's names

Two tables define the mapping: paths.py lists the names of each module, homes.py maps names to Loopwright's objects. The
other files are the adapters that homes.py points to.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable

from ...errors import ConfigError
from ...lazy import restore_paths
from .. import SITE, leave_site, with_site
from .imports.finder import ROOTS, VERSION, LightningFinder
from .parity import switches

__all__ = ["LIGHTNING_VERSION", "SITE", "LightningFinder", "child_environment", "install", "is_installed", "uninstall"]

LIGHTNING_VERSION = VERSION

# Read by compat/site/sitecustomize.py in child processes, and by `install` there.
SWITCH = "LOOPWRIGHT_COMPAT_LIGHTNING"
PARITY = "LOOPWRIGHT_PARITY"


def install(*, children: bool = True, parity: bool | Iterable[str] | None = None) -> None:
    """Let `lightning`, `pytorch_lightning`, `lightning_fabric` and their submodules be Loopwright from here on.

    Lightning may be installed or not; its own modules are not touched. Calling it again changes only the parity, if
    that is given; it applies to Trainers and Fabrics that are created afterwards.

    Args:
        children: Whether Python processes that this one starts do the same, through environment variables.
        parity: Whether every number and count is Lightning's, bit for bit on the CPU, where Loopwright by itself
            differs: True for all switches, or names of those in `loopwright run-lightning --parity=list`. None takes
            them from the environment variable LOOPWRIGHT_PARITY ("1" or names with commas); without it, none.

    Raises:
        ConfigError: A module of Lightning itself was imported before, or a switch is unknown.
    """
    before = [name for name in sys.modules if name.split(".")[0] in ROOTS and not _is_ours(name)]
    if before:
        raise ConfigError(
            f"{min(before)!r} and {len(before) - 1} more modules of Lightning itself are imported already.",
            fix="call loopwright.compat.lightning.install() before the first import of Lightning, and before libraries "
            "that import it; or start the program with `loopwright run-lightning`.",
        )
    finder = next((one for one in sys.meta_path if isinstance(one, LightningFinder)), None)
    if finder is None:
        finder = LightningFinder()
        sys.meta_path.insert(0, finder)
    if parity is None:
        parity = os.environ.get(PARITY) or None
    if parity is not None:
        finder.parity = switches.choose(parity)
        finder.replace_by(switches.find_replacement)
        if children:
            os.environ[PARITY] = switches.as_text(finder.parity)
    if children:
        os.environ.update(child_environment(os.environ.get("PYTHONPATH", "")))


def uninstall() -> None:
    """Undo `install`; modules that are imported already keep what they have."""
    restore_paths()
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, LightningFinder)]
    for name in [name for name in sys.modules if name.split(".")[0] in ROOTS and _is_ours(name)]:
        del sys.modules[name]
    rank_zero = sys.modules.get(f"{__name__}.utilities.rank_zero")
    if rank_zero is not None:
        del rank_zero.rank_zero_only.rank
    os.environ.pop(PARITY, None)
    leave_site(SWITCH)


def is_installed() -> bool:
    """Return whether Lightning's names are Loopwright's in this process."""
    return any(isinstance(finder, LightningFinder) for finder in sys.meta_path)


def child_environment(python_path: str) -> dict[str, str]:
    """Return the environment variables with which a Python process calls `install` at its start.

    Args:
        python_path: The current PYTHONPATH; its folders follow ours.
    """
    return {SWITCH: "1", "PYTHONPATH": with_site(python_path)}


def _is_ours(name: str) -> bool:
    module = sys.modules[name]
    return isinstance(getattr(module, "__loader__", None), LightningFinder)
