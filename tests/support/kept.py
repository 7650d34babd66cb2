"""Which values of a parametrized test run in `make test`; the others run in `make test-slow`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

__all__ = ["keep"]


def keep(values: Iterable[Any], *kept: Any) -> list[Any]:
    """Mark all `values` but `kept` as slow. A tuple is the values of several parameters.

    Raises:
        ValueError: One of `kept` is not among `values`.
    """
    values = list(values)
    if unknown := [value for value in kept if value not in values]:
        raise ValueError(f"Expected values of the test, got {unknown}.")
    return [
        pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=[pytest.mark.slow] * (value not in kept))
        for value in values
    ]
