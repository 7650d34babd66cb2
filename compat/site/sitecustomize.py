"""Installs another framework's names at the start of a process whose parent asked for it, then runs the user's own
sitecustomize. Python imports it, because `child_environment` puts this folder into PYTHONPATH."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from importlib.machinery import PathFinder
from importlib.util import module_from_spec


def _install(framework: str) -> None:
    try:
        layer = import_module(f"loopwright.compat.{framework}")
    except ImportError:  # an interpreter of another environment, without Loopwright: nothing to do
        return
    layer.install()


def _run_the_next() -> None:
    here = os.path.dirname(os.path.abspath(__file__))
    spec = PathFinder.find_spec("sitecustomize", [path for path in sys.path if os.path.abspath(path) != here])
    if spec is not None and spec.loader is not None:
        module = module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


for _framework in ("lightning", "accelerate"):
    if os.environ.get(f"LOOPWRIGHT_COMPAT_{_framework.upper()}") == "1":
        _install(_framework)
_run_the_next()
