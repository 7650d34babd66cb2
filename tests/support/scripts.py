"""Programs outside of the package, as modules whose functions a test calls."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

__all__ = ["load_script"]


def load_script(path: str) -> ModuleType:
    """Return the module of a file, named from the repository's root; it is executed each time, as `python` does it."""
    script = Path(__file__).resolve().parents[2] / path
    spec = importlib.util.spec_from_file_location(script.stem, script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(script.parent))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(script.parent))
    return module
