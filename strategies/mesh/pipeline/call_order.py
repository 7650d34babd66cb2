"""In which order a module calls its submodules, as its source says: some are registered in another one."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator

from torch import nn


def called_before(kind: type[nn.Module], blocks: str) -> dict[str, bool]:
    """Return which submodules forward calls, each with whether it first does so before it uses that of the blocks.

    Args:
        kind: Class of the module.
        blocks: Name of the submodule that has the blocks.

    Returns:
        Empty where the source does not say: it is not there, or uses the blocks in no method that forward calls.
    """
    order = list(_uses(kind, "forward", frozenset()))
    first = next((number for number, (name, _) in enumerate(order) if name == blocks), None)
    if first is None:
        return {}
    found: dict[str, bool] = {}
    for number, (name, is_call) in enumerate(order):
        if is_call and name != blocks:
            found.setdefault(name, number < first)
    return found


def _uses(kind: type[nn.Module], method: str, within: frozenset[str]) -> Iterator[tuple[str, bool]]:
    """Yield the attributes of `self` that a method uses, and whether it calls them, in the order in which it runs."""
    function = _method(kind, method)
    if function is None or not function.args.args or method in within:
        return
    within |= {method}
    for name, is_call in _in_order(function, function.args.args[0].arg):
        if is_call and _method(kind, name) is not None:
            yield from _uses(kind, name, within)
        else:
            yield name, is_call


def _in_order(node: ast.AST, of: str) -> Iterator[tuple[str, bool]]:
    if isinstance(node, ast.Call):
        for one in (*node.args, *node.keywords):
            yield from _in_order(one, of)
        name = _attribute(node.func, of)
        if name is None:
            yield from _in_order(node.func, of)
        else:
            yield name, True
        return
    name = _attribute(node, of)
    if name is not None:
        yield name, False
    for child in ast.iter_child_nodes(node):
        yield from _in_order(child, of)


def _attribute(node: ast.AST, of: str) -> str | None:
    is_own = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == of
    return node.attr if is_own and isinstance(node, ast.Attribute) else None


def _method(kind: type[nn.Module], name: str) -> ast.FunctionDef | None:
    """Return the source of a method; None of one of torch, or where there is none."""
    owner = next((one for one in kind.__mro__ if name in one.__dict__), None)
    if owner is None or owner.__module__.partition(".")[0] == "torch" or not inspect.isroutine(owner.__dict__[name]):
        return None
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(owner)))
    except (OSError, TypeError, SyntaxError):  # made without a source file
        return None
    body = tree.body[0]
    found = body.body if isinstance(body, ast.ClassDef) else []
    return next((one for one in found if isinstance(one, ast.FunctionDef) and one.name == name), None)
