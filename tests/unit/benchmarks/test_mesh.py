"""benchmarks/model_parallel/: how numbers of ranks are joined; what is measured is in test_run.py."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = str(Path(__file__).resolve().parents[3] / "benchmarks")


@pytest.fixture
def mesh(monkeypatch: pytest.MonkeyPatch) -> Any:
    # At the end: names there may be those of test support.
    monkeypatch.setattr(sys, "path", [*sys.path, BENCHMARKS])
    from model_parallel import steps

    return steps


def rank(mesh: Any, hand: list[tuple[float, float]], trainer: list[tuple[float, float]]) -> dict[str, Any]:
    return {
        "size": mesh.SIZES["tp"][0].numbers,
        "rounds": {"hand": hand, "trainer": trainer},
        "calls": {"hand": (10, 5), "trainer": (12, 6)},
        "largest_difference": 0.0,
    }


def test_ratio_is_the_median_over_turns_and_cpu_time_is_that_of_all_ranks(mesh: Any) -> None:
    first = rank(mesh, [(1.0, 0.5), (2.0, 0.5), (1.0, 0.5)], [(1.1, 0.5), (2.0, 1.0), (3.0, 1.0)])
    second = rank(mesh, [(9.0, 0.5)] * 3, [(9.0, 1.0)] * 3)
    row = mesh.joined([first, second])
    assert (row["ratio"], row["ratios"]) == (1.1, [1.0, 3.0])
    assert (row["modes"]["hand"]["cpu_us"], row["modes"]["trainer"]["cpu_us"]) == (1e6, 2e6)
    assert row["cpu_ratio"] == 2.0


def test_section_names_weights_that_differ(mesh: Any) -> None:
    from model_parallel.report import describe_mesh

    row = mesh.joined([rank(mesh, [(1.0, 1.0)], [(1.25, 1.0)])] * 2)
    bubble = {"schedule": "1f1b", "ranks": 4, "stages_per_rank": 1, "count": 8, "step_s": 1.0, "bubble": 0.3}
    numbers = {"axes": {"tp": [row], "pp": []}, "bubbles": [{**bubble, "theory": 3 / 11}]}
    text = "\n".join(describe_mesh(numbers))
    assert "**1.25**" in text
    assert "**+2 +1**" in text
    assert "EXCEPT" not in text
    row["largest_difference"] = 1e-3
    assert "EXCEPT in: tp=2 (tiny, by 1.0e-03)" in "\n".join(describe_mesh(numbers))


def test_bubble_of_four_ranks_and_eight_micro_batches(mesh: Any) -> None:
    from model_parallel.bubbles import bubble_in_theory

    assert bubble_in_theory("1f1b", 4, 8) == pytest.approx(3 / 11)
    assert bubble_in_theory("interleaved", 4, 8) == pytest.approx(3 / 19)
    assert bubble_in_theory("zbv", 4, 8) is None


def test_both_sides_split_the_same_layers(mesh: Any) -> None:
    from model_parallel.model import Step, make

    from loopwright.strategies.mesh.tensor import resolve_plan

    size = mesh.SIZES["tp"][0]
    plan = resolve_plan(Step(make(size), lambda: None), mesh.TENSOR_PLAN, tp=2)
    assert len(plan.styles) == 2 + 6 * size.blocks
