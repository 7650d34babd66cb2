"""benchmarks/rank_growth.py: what a rank costs does not grow with the number of ranks where it can be counted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"


@pytest.fixture
def rank_growth(monkeypatch: pytest.MonkeyPatch) -> Any:
    # At the end: names there may be those of test support.
    monkeypatch.setattr(sys, "path", [*sys.path, str(BENCHMARKS)])
    import rank_growth

    return rank_growth


def numbers_of(ranks: int) -> dict[str, Any]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for name in ("LOCAL_RANK", "RANK", "WORLD_SIZE"):
        environment.pop(name, None)
    command = [sys.executable, str(BENCHMARKS / "rank_growth.py"), str(ranks), "16"]
    text = subprocess.check_output(command, text=True, env=environment)
    found: dict[str, Any] = json.loads(text.splitlines()[-1])
    return found


@pytest.mark.slow
def test_calls_and_collectives_of_a_rank_do_not_grow_with_the_number_of_ranks() -> None:
    two, three = numbers_of(2), numbers_of(3)
    for name in ("hand-written DDP", "Trainer"):
        assert three[name]["calls"] == pytest.approx(two[name]["calls"], abs=1), name
        assert three[name]["collectives"] == two[name]["collectives"] == 1, name
    assert two["Trainer"]["calls"] < two["hand-written DDP"]["calls"] + 25


def test_a_step_is_the_median_difference_after_the_first_ten(rank_growth: Any) -> None:
    meter = rank_growth.Meter()
    meter.marks = [(1000.0 * index, 0, 0) for index in range(10)]
    meter.marks += [(0.0, 0, 0), (2.0, 30, 1), (4.0, 60, 2), (90.0, 90, 3)]
    assert [meter.per_step(kind) for kind in range(3)] == [2.0, 30, 1]


def test_calls_are_counted_within_the_meter_only(rank_growth: Any) -> None:
    def called() -> None: ...

    meter = rank_growth.Meter()
    called()
    with meter:
        called()
        called()
    assert meter.calls == 3  # and the end of the meter


def test_the_section_has_a_row_for_each_cost(rank_growth: Any) -> None:
    sizes = (1, 2, 4, 8)
    rows = [
        rank_growth._row("Trainer", "a step", "CPU us", sizes, [100, 200, 400, 800]),
        rank_growth._row("Trainer", "a step", "collectives", sizes, [1, 1, 1, 1]),
    ]
    text = rank_growth.describe_rank_growth(rows)[-1]
    assert "| Trainer | a step | CPU us | 100 | 200 | 400 | 800 | **1.00** |" in text
    assert "| Trainer | a step | collectives | 1 | 1 | 1 | 1 | **none** |" in text
