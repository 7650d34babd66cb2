"""tests/traps.md names every trap and tests that exist."""

from __future__ import annotations

import ast
import re
from functools import cache

from .sources import ROOT, tree_of

TESTS = ROOT / "tests"
LINES = (TESTS / "traps.md").read_text().splitlines()
NUMBERED = re.compile(r"(\d+)\. \S")
NAMED = re.compile(r"([\w/]+\.py)::(\w+)")


@cache
def names_in(path: str) -> frozenset[str]:
    file = TESTS / path
    if not file.is_file():
        return frozenset()
    functions = [node for node in ast.walk(tree_of(file)) if isinstance(node, ast.FunctionDef)]
    return frozenset(node.name for node in functions if node.name.startswith("test_"))


def test_each_trap_has_its_number_and_a_test() -> None:
    numbered = [(int(match[1]), line) for line in LINES if (match := NUMBERED.match(line))]
    assert [number for number, _ in numbered] == list(range(1, 83))
    assert [line for _, line in numbered if not NAMED.search(line)] == []


def test_each_test_that_is_named_exists() -> None:
    named = [pair for line in LINES for pair in NAMED.findall(line)]
    assert len(named) > 82
    assert [f"{path}::{name}" for path, name in named if name not in names_in(path)] == []
