"""benchmarks/growth.py: exponents, and that no count of calls grows faster than linearly."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = str(Path(__file__).resolve().parents[3] / "benchmarks")


@pytest.fixture
def growth(monkeypatch: pytest.MonkeyPatch) -> Any:
    # At the end: names there may be those of test support.
    monkeypatch.setattr(sys, "path", [*sys.path, BENCHMARKS])
    import growth

    return growth


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0])
def test_the_exponent_is_that_of_the_costs(growth: Any, power: float) -> None:
    sizes = (0, 1, 10, 100, 1000)
    costs = [50 + 20 * size**power for size in sizes]
    assert growth.exponent(sizes, costs) == pytest.approx(power)


def test_what_does_not_grow_has_no_exponent(growth: Any) -> None:
    assert growth.exponent((1, 10, 100), (200.0, 203.0, 198.0)) is None


def test_small_sizes_that_add_nothing_do_not_count(growth: Any) -> None:
    assert growth.exponent((0, 1, 10, 100), (500.0, 495.0, 700.0, 2500.0)) == pytest.approx(1.0)


@pytest.mark.parametrize("number", range(10))
def test_calls_grow_linearly_at_most(growth: Any, number: int) -> None:
    curve = growth.CURVES[number]
    sizes = curve.quick
    calls = [curve.measure(size, growth.Clock(counts=True)) for size in sizes]
    slope = growth.exponent(sizes, calls)
    assert slope is None or slope < 1.1, calls
    if curve.name == "callbacks that hear nothing":
        assert len(set(calls)) == 1, calls
    if curve.name == "callbacks that hear two events":
        assert calls[-1] - calls[0] <= 2 * sizes[-1] + 2, calls
    if curve.name == "logged values":
        assert calls[-1] - calls[0] <= sizes[-1] + 10, calls


def test_the_curves_are_ten(growth: Any) -> None:
    assert len(growth.CURVES) == 10
