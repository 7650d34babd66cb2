"""benchmarks/memory.py: the closed forms; what is measured against them is in tests/unit/benchmarks/test_run.py."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = str(Path(__file__).resolve().parents[3] / "benchmarks")


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Any:
    # At the end: names there may be those of test support.
    monkeypatch.setattr(sys, "path", [*sys.path, BENCHMARKS])
    import memory

    return memory


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 112), (1, 70), (2, 49), (3, 28)])
def test_seven_billion_float32_parameters_on_four_ranks_as_textbooks_have_it(
    memory: Any, stage: int, gigabytes: int
) -> None:
    assert 7 * memory.textbook(stage, 4).total == gigabytes


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_mixed_precision_as_in_the_paper(memory: Any, stage: int, gigabytes: float) -> None:
    """Figure 1 of the ZeRO paper: 7.5 billion parameters on 64 devices."""
    assert 7.5 * memory.textbook(stage, 64, is_mixed=True).total == pytest.approx(gigabytes, abs=0.05)


def test_deepspeed_keeps_masters_of_float32_parameters(memory: Any) -> None:
    for stage in (1, 2, 3):
        assert memory.expected(f"deepspeed {stage}", "32-true", 4).optimizer == 3 * 4 / 4
        assert memory.textbook(stage, 4).optimizer == 2 * 4 / 4


def test_every_case_has_a_form_and_none_needs_more_than_ddp(memory: Any) -> None:
    forms = {
        (name, precision, ranks): memory.expected(name, precision, ranks).total
        for name in memory.CASES
        for precision in memory.PRECISIONS
        for ranks in (2, 4, 8)
    }
    assert max(forms.values()) == forms["ddp", "32-true", 2] == 20
    assert all(
        forms[name, precision, 8] < forms[name, precision, 2]
        for name in memory.CASES
        for precision in memory.PRECISIONS
        if name in memory.ON_FOUR
    )
