"""benchmarks/compare.py finds a planted slowdown, and the commit that brought it; no clock is asserted."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = str(Path(__file__).resolve().parents[3] / "benchmarks")


@pytest.fixture
def compare(monkeypatch: pytest.MonkeyPatch) -> Any:
    # At the end: names there may be those of test support.
    monkeypatch.setattr(sys, "path", [*sys.path, BENCHMARKS])
    import compare

    return compare


def test_a_row_that_is_slower_by_more_than_its_spread_is_named(compare: Any) -> None:
    before = [{"BARE": 0.90, "LOGGED": 0.95}, {"BARE": 0.92, "LOGGED": 0.99}, {"BARE": 0.91, "LOGGED": 0.91}]
    now = [{"BARE": 1.01, "LOGGED": 0.97}, {"BARE": 1.02, "LOGGED": 0.98}, {"BARE": 1.00, "LOGGED": 1.02}]
    changes = compare.compare(before, now)
    assert [change.row for change in changes if change.is_slower] == ["BARE"]
    text = compare.report(changes, "0123456789abcdef")
    assert "Slower by more than the spread: BARE." in text
    assert "0123456789ab, then" in text


def test_noise_is_no_slowdown(compare: Any) -> None:
    turns = [{"BARE": value} for value in (0.9, 1.1, 0.95)]
    changes = compare.compare(turns, [{"BARE": value + 0.05} for value in (0.9, 1.1, 0.95)])
    assert not changes[0].is_slower
    assert "Nothing is slower" in compare.report(changes, "0" * 40)


def test_both_sides_take_turns_and_each_begins_in_every_other_one(compare: Any) -> None:
    order: list[str] = []

    def side(name: str) -> Any:
        def measure() -> dict[str, float]:
            order.append(name)
            return {"BARE": 1.0}

        return measure

    found = compare.turns_of([side("a"), side("b")], 3)
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert [len(turns) for turns in found] == [3, 3]


@pytest.mark.parametrize("planted", range(9))
def test_the_search_finds_the_planted_commit_with_few_questions(compare: Any, planted: int) -> None:
    commits = [str(number) for number in range(9)]
    asked: list[str] = []

    def is_slow(commit: str) -> bool:
        asked.append(commit)
        return int(commit) >= planted

    assert compare.find_slow_commit(commits, is_slow) == str(planted)
    assert len(asked) <= 4


def test_the_commit_that_made_a_row_slower_is_named(
    compare: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def git(*arguments: str) -> None:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", *identity, "-C", str(tmp_path), *arguments], check=True, capture_output=True)

    git("init", "--quiet")
    for number, cost in enumerate((0.8, 0.8, 1.2, 1.2)):
        (tmp_path / "cost").write_text(f"{cost} {number}")
        git("add", "cost")
        git("commit", "--quiet", "-m", f"change {number}")
    monkeypatch.setattr(compare, "ROOT", tmp_path)

    def counted(tree: Path, rows: Sequence[str], num_batches: int) -> dict[str, float]:
        return dict.fromkeys(rows, float((tree / "cost").read_text().split()[0]))

    assert compare.main("HEAD~3", bisects=True, is_quick=True, measure=counted) == 1
    assert "BARE became slower with" in (told := capsys.readouterr().out)
    assert told.rstrip().endswith("change 2")
    assert compare.main("HEAD~1", bisects=True, is_quick=True, measure=counted) == 0
    assert not list(tmp_path.glob(".git/worktrees/*"))


@pytest.mark.slow
def test_the_present_tree_is_measured_in_a_process_of_its_own(compare: Any) -> None:
    ratios = compare.measure_tree(compare.ROOT, ["BARE"], 60)
    assert set(ratios) == {"BARE"}
    assert ratios["BARE"] > 0
