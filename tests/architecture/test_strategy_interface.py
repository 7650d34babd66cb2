"""Requests to a strategy: each is declared on `Strategy`, where type checkers and authors of strategies see it."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TypeGuard

import pytest

from loopwright import strategies
from loopwright.strategies import Strategy, optional
from loopwright.strategies.traits import Traits

from .sources import ROOT, package_files, place, tree_of

# Engines know each other; Lightning's views add attributes of their own.
OUTSIDE = (
    "strategies/",
    "compat/lightning/connectors.py",
    "compat/lightning/own_parts.py",
    "compat/lightning/strategies.py",
)
# Names of variables and attributes that hold a strategy; arguments of `strategy=` may be strings.
HOLDERS = {"strategy", "_strategy", "chosen_strategy"}
OF_STRINGS = {"lower"}
BY_NAME = {"getattr", "hasattr", "setattr", "delattr"}

OPTIONAL = [one for one in vars(optional).values() if getattr(one, "__module__", "") == optional.__name__]
DECLARED = {
    name
    for cls in (*Strategy.__mro__, *OPTIONAL)
    for name in (*vars(cls), *vars(cls).get("__annotations__", ()))
    if not name.startswith("_")
}


def problems_in(tree: ast.Module) -> Iterator[tuple[ast.AST, str]]:
    """Give every node that asks a strategy for what `Strategy` does not declare, with what is wrong."""
    holders = HOLDERS | set(_aliases(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _is_strategy(node.value, holders):
            if node.attr not in DECLARED | OF_STRINGS:
                yield node, f".{node.attr} is not declared on Strategy"
            elif node.attr == "strategy_name":
                yield node, ".strategy_name says nothing about what a strategy can do: declare a capability"
        elif _is_by_name(node) and _is_strategy(node.args[0], holders):
            yield node, f"{ast.unparse(node)}: declare the attribute on Strategy"


def _aliases(tree: ast.Module) -> Iterator[str]:
    """Give local names that are assigned a strategy, alone or in a tuple."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            continue
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            pairs = [(target, node.value)]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = list(zip(target.elts, node.value.elts, strict=True))
            for name, value in pairs:
                if isinstance(name, ast.Name) and _is_strategy(value, HOLDERS):
                    yield name.id


def _is_by_name(node: ast.AST) -> TypeGuard[ast.Call]:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in BY_NAME


def _is_strategy(node: ast.expr, holders: set[str]) -> bool:
    if isinstance(node, ast.Name):
        return node.id in holders
    return isinstance(node, ast.Attribute) and node.attr in HOLDERS


def sources() -> list[Path]:
    return [file for file in package_files() if not str(file.relative_to(ROOT)).startswith(OUTSIDE)]


def test_strategies_are_asked_only_for_what_strategy_declares() -> None:
    found = [f"{place(file, node)}: {what}" for file in sources() for node, what in problems_in(tree_of(file))]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "source",
    [
        "self.strategy.deepspeed_engine.step()",
        "fabric.strategy._device",
        "getattr(trainer.strategy, 'uneven', 'stop_all')",
        "hasattr(strategy, 'state_dict')",
        "strategy, loader = run.fabric.strategy, None\nstrategy.plan",
        "own = trainer.strategy\nown.plan",
        "if strategy.strategy_name == 'dp': pass",
    ],
)
def test_an_undeclared_request_is_found(source: str) -> None:
    assert list(problems_in(ast.parse(source)))


@pytest.mark.parametrize(
    "source", ["trainer.strategy.uneven", "strategy.lower() == 'auto'", "strategy.gather_objects(1)"]
)
def test_a_declared_request_is_accepted(source: str) -> None:
    assert not list(problems_in(ast.parse(source)))


def test_the_interface_has_few_members_and_none_that_one_engine_alone_answers() -> None:
    own = {name: one for name, one in vars(Strategy).items() if not name.startswith("_")}
    # Two names of one function or property are one member.
    members = {id(one) if inspect.isfunction(one) or isinstance(one, property) else name for name, one in own.items()}
    assert len(members) <= 51
    answered: dict[str, set[str]] = {}
    for cls in (getattr(strategies, name) for name in strategies.__all__):
        if inspect.isclass(cls) and issubclass(cls, Strategy):
            for base in set(cls.__mro__) & set(_subclasses(Strategy)):
                for name in own.keys() & vars(base).keys():
                    answered.setdefault(name, set()).add(base.__module__.split(".")[2])
    assert [name for name, engines in answered.items() if len(engines) == 1 and engines != {"parallel"}] == []


def _subclasses(cls: type) -> Iterator[type]:
    for one in cls.__subclasses__():
        yield one
        yield from _subclasses(one)


def test_every_trait_is_described() -> None:
    described = re.findall(r"^        (\w+): ", Traits.__doc__ or "", re.MULTILINE)
    assert described == [one.name for one in dataclasses.fields(Traits)]
