"""The grammar of `limit_*_batches`."""

from __future__ import annotations

import math
from typing import Any

import pytest

from loopwright.data import find_length, resolve_limit
from loopwright.errors import ConfigError


@pytest.mark.parametrize(
    ("limit", "length", "expected"),
    [
        (None, 10, 10),
        (None, None, math.inf),
        (None, math.inf, math.inf),
        (1.0, 10, 10),
        (1.0, None, math.inf),
        (1, 10, 1),
        (20, 10, 10),
        (20, None, 20),
        (0, 10, 0),
        (0.0, 10, 0),
        (0.0, None, 0),
        (0.25, 10, 2),
        (0.5, 0, 0),
        (3.0, 10, 3),
    ],
)
def test_limits(limit: Any, length: Any, expected: Any) -> None:
    resolved = resolve_limit(limit, length)
    assert resolved == expected
    assert resolved == math.inf or isinstance(resolved, int)


@pytest.mark.parametrize("limit", [-1, -0.5, 1.5, math.inf, math.nan, "3", True])
def test_what_is_no_limit_is_an_error_that_names_the_argument(limit: Any) -> None:
    with pytest.raises(ConfigError, match="limit_val_batches="):
        resolve_limit(limit, 10, "limit_val_batches")


def test_a_fraction_without_a_batch_names_the_least_fraction() -> None:
    with pytest.raises(ConfigError, match=r"less than one batch[\s\S]*=0.125"):
        resolve_limit(0.1, 8)


def test_a_fraction_of_an_unknown_length_is_an_error() -> None:
    with pytest.raises(ConfigError, match="no __len__"):
        resolve_limit(0.1, None)


def test_find_length() -> None:
    assert find_length([1, 2]) == 2
    assert find_length(iter([1])) is None
