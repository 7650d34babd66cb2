"""Programs outside of the package, as modules whose functions a test calls."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

__all__ = ["load_script"]


def load_script(path: str) -> ModuleType:
    """Return the module of a file, named from the repository's root; it is executed each time."""
    script = Path(__file__).resolve().parents[2] / path
    spec = importlib.util.spec_from_file_location(script.stem, script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
