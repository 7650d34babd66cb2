"""Packages of `.venv/apart`, which are installed without what they ask for; tests/apart.txt says why."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

__all__ = ["APART", "add_apart_to_path"]

APART = Path(__file__).parents[2] / ".venv" / "apart"


def add_apart_to_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the test import these packages; a package of the environment is preferred."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(APART)])
