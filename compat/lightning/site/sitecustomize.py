"""Installs Lightning's names at the start of a Python process whose parent asked for it, then runs the user's own
sitecustomize. Python imports it, because `child_environment` puts this folder into PYTHONPATH."""

from __future__ import annotations

import os
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec


def _install() -> None:
    try:
        from loopwright.compat.lightning import install
    except ImportError:  # an interpreter of another environment, without Loopwright: nothing to do
        return
    install()


def _run_the_next() -> None:
    here = os.path.dirname(os.path.abspath(__file__))
    spec = PathFinder.find_spec("sitecustomize", [path for path in sys.path if os.path.abspath(path) != here])
    if spec is not None and spec.loader is not None:
        module = module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


if os.environ.get("LOOPWRIGHT_COMPAT_LIGHTNING") == "1":
    _install()
_run_the_next()
