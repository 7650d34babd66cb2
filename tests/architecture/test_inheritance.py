"""Inheritance: a reader of a strategy opens four files at most, and none that two base classes share."""

from __future__ import annotations

import ast
from functools import cache

from .sources import ROOT, package_files, tree_of

DEEPEST = 4  # Strategy, ParallelStrategy, ShardedStrategy, MeshStrategy


@cache
def bases() -> dict[str, list[str]]:
    """Return the bases of each class of strategies/ by its name, without those of other packages."""
    files = [file for file in package_files() if file.is_relative_to(ROOT / "strategies")]
    classes = [node for file in files for node in ast.walk(tree_of(file)) if isinstance(node, ast.ClassDef)]
    own = {node.name for node in classes}
    return {
        node.name: [one.id for one in node.bases if isinstance(one, ast.Name) and one.id in own - {node.name}]
        for node in classes
    }


def depth(name: str) -> int:
    return 1 + max(map(depth, bases()[name]), default=0)


def test_strategies_are_at_most_four_classes_deep() -> None:
    assert depth("MeshStrategy") == DEEPEST
    assert not {name: depth(name) for name in bases() if depth(name) > DEEPEST}


def test_no_class_of_strategies_has_two_bases_of_the_library() -> None:
    assert not {name for name, found in bases().items() if len(found) > 1}
