"""The package's own files as syntax trees; used by the tests of this folder."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# Folders at the root that are no part of the package.
OUTSIDE = {"tests", "docs", "examples", "benchmarks", "build", "site", "runs"}


@cache
def package_folders() -> tuple[Path, ...]:
    """Return the folders of the package: the root, and every folder with an `__init__.py` that is not outside."""
    found = [ROOT]
    for folder, inner, files in os.walk(ROOT):
        is_root = folder == str(ROOT)
        # Not looked into: environments, which have a hundred times as many files as the package.
        inner[:] = sorted(name for name in inner if not name.startswith(".") and not (is_root and name in OUTSIDE))
        if "__init__.py" in files and not is_root:
            found.append(Path(folder))
    return tuple(found)


@cache
def package_files() -> tuple[Path, ...]:
    """Return every Python file of the package."""
    return tuple(file for folder in package_folders() for file in sorted(folder.glob("*.py")))


@cache
def tree_of(file: Path) -> ast.Module:
    """Return the syntax tree of a file."""
    return ast.parse(file.read_text(), str(file))


def place(file: Path, node: ast.AST) -> str:
    """Return `file:line`, relative to the root."""
    return f"{file.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"


def calls(file: Path) -> Iterator[ast.Call]:
    """Give every call in a file."""
    return (node for node in ast.walk(tree_of(file)) if isinstance(node, ast.Call))
