"""Other frameworks' names on Loopwright, so that programs written for them run unmodified."""

from __future__ import annotations

import os

__all__ = ["SITE", "leave_site", "with_site"]

SITE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "site")
"""The folder whose sitecustomize installs the names in child processes."""


def with_site(python_path: str) -> str:
    """Return a PYTHONPATH that begins with `SITE`."""
    return os.pathsep.join([SITE, *_without_site(python_path)])


def leave_site(switch: str) -> None:
    """Remove a layer's variable from the environment, and `SITE` from PYTHONPATH when no other layer needs it."""
    os.environ.pop(switch, None)
    if "PYTHONPATH" not in os.environ or any(name.startswith("LOOPWRIGHT_COMPAT_") for name in os.environ):
        return
    os.environ["PYTHONPATH"] = os.pathsep.join(_without_site(os.environ["PYTHONPATH"]))


def _without_site(python_path: str) -> list[str]:
    return [path for path in python_path.split(os.pathsep) if path not in ("", SITE)]
