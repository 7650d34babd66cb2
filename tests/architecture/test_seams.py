"""Layers on top of the core exchange its seams only: they use no private name of another room, and change no class."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LAYERS = ("compat", "recipes")

# Private names of others that a layer uses, and why there is no other way.
ALLOWED = {
    "_world": "torch: the only list of its process groups",
    "_HYBRID_SHARD_ZERO2": "torch: the member of a public enumeration has no other name",
    "_parameters": "torch: parameters by name, of a module that is changed while it is walked",
    "_load_tensor": "Lightning's own name for what loads a tensor that is not yet loaded",
    "_lw_begin": "WandbLogger: the method that a logger's subclass extends, through super()",
    "_lw_send": "WandbLogger, LearningRateMonitor: the same",
    "_lw_launch": "Trainer: the method that its subclass extends, through super()",
}


def sources() -> list[Path]:
    return [path for layer in LAYERS for path in sorted((ROOT / layer).rglob("*.py"))]


def defined_privately(trees: list[ast.Module]) -> set[str]:
    """Return the private names that the layers define themselves: functions, classes, attributes of `self`."""
    found = set()
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_own(node.value):
                found.add(node.attr)
    return {name for name in found if name.startswith("_")}


def _is_own(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def private_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield private attributes of other objects than `self`, also through `super()`."""
    for node in ast.walk(tree):
        is_private = isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__")
        if is_private and not _is_own(node.value):
            yield node.lineno, node.attr


def imported(tree: ast.Module) -> set[str]:
    """Return the names that a file binds by imports within the package: classes, functions and modules of the core."""
    return {
        (alias.asname or alias.name).split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.level > 1
        for alias in node.names
    }


def changes(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield `setattr` with a literal name, and assignments to attributes of imported classes and modules."""
    names = imported(tree)
    for node in ast.walk(tree):
        is_by_name = isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("setattr", "delattr")
        if is_by_name and isinstance(node.args[1], ast.Constant):
            yield node.lineno, ast.unparse(node)
        targets = node.targets if isinstance(node, ast.Assign | ast.Delete) else []
        for target in targets:
            if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id in names:
                yield node.lineno, ast.unparse(target)


def test_the_allowed_private_names_are_few_and_needed() -> None:
    used = {name for path in sources() for _, name in private_names(ast.parse(path.read_text()))}
    assert len(ALLOWED) <= 10
    assert not ALLOWED.keys() - used


def test_layers_use_no_private_name_of_another_room() -> None:
    trees = {path: ast.parse(path.read_text()) for path in sources()}
    own = defined_privately(list(trees.values()))
    found = [
        f"{path.relative_to(ROOT)}:{line} {name}"
        for path, tree in trees.items()
        for line, name in private_names(tree)
        if name not in ALLOWED and not (name in own and not name.startswith("_lw_"))
    ]
    assert found == []


def test_layers_change_no_class_and_no_module_of_the_core() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line} {text}"
        for path in sources()
        for line, text in changes(ast.parse(path.read_text()))
    ]
    assert found == [
        "recipes/model/loading.py:199 setattr(module, 'support_avx512bf16_for_cpu', False)",  # of a torch module
    ]


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("setattr(trainer, 'fit', f)", 1),
        ("from ...trainer import Trainer\nTrainer.fit = f", 1),
        ("from ...data import tree\ntree.is_collection = f", 1),
        ("from ...data import tree\ndel tree.is_collection", 1),
        ("from ...data import tree\nloader = tree.make()\nloader.limit = 1", 0),
        ("for name in names:\n    setattr(self, name, 1)", 0),
    ],
)
def test_a_change_of_the_core_is_found(text: str, count: int) -> None:
    assert len(list(changes(ast.parse(text)))) == count
