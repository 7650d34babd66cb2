from __future__ import annotations

from typing import Any

import pytest

from loopwright.errors import ConfigError
from loopwright.strategies import MeshStrategy
from loopwright.strategies.mesh.context import Context


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ({"inputs": ["input_ids"]}, r"Expected Context\(inputs=...\) to be a dict of dimensions, got \['input_ids'\]"),
        ({"inputs": {}}, r"Expected at least one entry in Context\(inputs=...\), got an empty dict"),
        ({"inputs": {"input_ids": -1, 0: 1}}, r"in Context\(inputs=...\), got 'input_ids': -1, 0: 1"),
        ({"batch": {"tokens": True}}, r"in Context\(batch=...\), got 'tokens': True"),
        ({"method": "ulyses"}, r"Expected Context\(method='gather' or 'ulysses'\), got 'ulyses' .*ulysses"),
        ({"module": ""}, r"Expected Context\(module=...\) to be the name of a submodule, got ''"),
        ({"inputs": {"x": 1}, "batch": {"x": 1}}, "got both"),
    ],
)
def test_a_wrong_argument_is_named(arguments: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        Context(**arguments)


def test_every_problem_is_named_at_once() -> None:
    with pytest.raises(ConfigError, match=r"(?s)Context\(inputs=.*Context\(method="):
        Context(inputs={}, method="ring")


def test_positions_in_a_tuple_name_entries_of_a_batch() -> None:
    assert Context(batch={0: 1, 1: 1}).batch == {0: 1, 1: 1}


def test_other_options_are_refused_by_the_strategy() -> None:
    with pytest.raises(ConfigError, match="Expected context= to be a Context, got 'ulysses'"):
        MeshStrategy(cp=2, context="ulysses")
