"""benchmarks/structure.py counts what it says it counts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

BENCHMARKS = str(Path(__file__).resolve().parents[3] / "benchmarks")

SOURCES = {
    "__init__.py": '"""The package."""\n',
    "room/__init__.py": '"""A room."""\n',
    "room/a.py": (
        '"""A file."""\n'
        "from typing import TYPE_CHECKING, Any\n"
        "if TYPE_CHECKING:\n"
        "    from .b import B\n"
        "def shown(x: Any) -> None:\n"
        '    """Documented."""\n'
        "    from ..other import c\n"
        "def bare(): ...\n"
    ),
    "room/b.py": "from .a import shown\nclass B:\n    def method(self):\n" + "        x = 1\n" * 50,
    "other/c.py": '"""Imports nothing."""\n',
}


def test_the_numbers_are_those_of_the_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, BENCHMARKS])
    import structure

    counted = structure.measure(SOURCES)
    assert counted.rooms == {".": (1, 1, 0), "other": (1, 1, 0), "room": (3, 62, 2)}
    assert sorted(counted.functions) == [1, 3, 51]
    assert counted.share_above(40) == pytest.approx(1 / 3)
    assert counted.any_names == 2
    assert counted.local_imports == 1
    assert counted.public == (9, 5)  # five modules, shown, bare, B and its method
    assert counted.cycles == [2]  # room.a and room.b, by a typing-only import
