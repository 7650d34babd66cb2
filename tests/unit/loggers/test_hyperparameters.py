from __future__ import annotations

import math
from argparse import Namespace
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

from loopwright.errors import ConfigError
from loopwright.loggers.hyperparameters import Plain, flatten, plain_hyperparameters, to_yaml

_scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
_keys = st.text(max_size=40)
_values = st.recursive(
    _scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_keys, inner, max_size=4), max_leaves=12
)


class Color(Enum):
    RED = 1


@dataclass
class Size:
    width: int
    path: Path


@given(st.dictionaries(_keys, _values, max_size=5))
def test_yaml_reads_back_as_the_same_values(params: dict[str, Plain]) -> None:
    assert yaml.safe_load(to_yaml(params)) == params


def test_yaml_keeps_nan_and_infinities() -> None:
    read = yaml.safe_load(to_yaml({"a": math.nan, "b": math.inf, "c": -math.inf, "d": 1e-05}))
    assert math.isnan(read["a"])
    assert (read["b"], read["c"], read["d"]) == (math.inf, -math.inf, 1e-05)


def test_yaml_is_readable_for_the_common_case() -> None:
    assert to_yaml({"lr": 0.1, "name": "adam", "layers": [1, 2], "on": {"x": True}}) == (
        'lr: 0.1\nname: adam\nlayers:\n  - 1\n  - 2\n"on":\n  x: true\n'
    )


def test_what_is_not_plain_becomes_text() -> None:
    params = {
        "color": Color.RED,
        "size": Size(3, Path("a/b")),
        "args": Namespace(x=1),
        "tensor": torch.tensor(2.0),
        "dtype": torch.float32,
        "function": math.sqrt,
        "layer": torch.nn.Linear,
        "set": {2, 1},
        3: (1, 2),
    }
    assert plain_hyperparameters(params) == {
        "color": "RED",
        "size": {"width": 3, "path": "a/b"},
        "args": {"x": 1},
        "tensor": 2.0,
        "dtype": "torch.float32",
        "function": "sqrt",
        "layer": "Linear",
        "set": [1, 2],
        "3": [1, 2],
    }


def test_omegaconf_is_a_mapping_like_others() -> None:
    from omegaconf import OmegaConf

    config = OmegaConf.create({"a": 1, "b": {"c": "${a}"}, "d": [1, 2]})
    plain = plain_hyperparameters(config)
    assert plain["a"] == 1
    assert plain["b"] == {"c": 1}
    assert plain["d"] == [1, 2]


def test_omegaconf_lists_are_lists_and_resolved_at_every_depth() -> None:
    from omegaconf import OmegaConf

    config = OmegaConf.create(
        {"x": 5, "betas": [0.9, "${x}", ["${x}"]], "blocks": [{"width": "${x}"}], "open": ["???", "${nowhere}", "${x}"]}
    )
    expected = {
        "config": {
            "x": 5, "betas": [0.9, 5, [5]], "blocks": [{"width": 5}], "open": ["???", "${nowhere}", 5],
        },
        "betas": [0.9, 5, [5]],
        "deep": [{"inner": [{"width": 5}]}, [5]],
    }  # fmt: skip
    given = {"config": config, "betas": config.betas, "deep": ({"inner": config.blocks}, config.betas[2])}
    assert plain_hyperparameters(given) == expected
    assert yaml.safe_load(to_yaml(plain_hyperparameters(given))) == expected
    assert plain_hyperparameters(config) == expected["config"]


@pytest.mark.parametrize("params", [None, {}, Namespace()])
def test_no_hyperparameters(params: object) -> None:
    assert plain_hyperparameters(params) == {}
    assert to_yaml({}) == "{}\n"


@pytest.mark.parametrize("params", [3, "lr=1", [1]])
def test_other_types_are_an_error(params: object) -> None:
    with pytest.raises(ConfigError, match="hyperparameters are"):
        plain_hyperparameters(params)


def test_nested_names_are_joined_by_a_slash() -> None:
    flat = flatten({"a": {"b": {"c": 1}}, "d": [1, 2], "e": None, "f": "x", "g": {}})
    assert flat == {"a/b/c": 1, "d": "[1, 2]", "e": "None", "f": "x", "g": "{}"}


def test_names_that_become_one_stay_two() -> None:
    plain = plain_hyperparameters({1: "number", "1": "text", "a": {"b": 1}, "a/b": 2})
    assert flatten(plain) == {"1": "number", "1_": "text", "a/b": 1, "a/b_": 2}
