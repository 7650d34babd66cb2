"""What a check says, and its exit code, for each way in which the two sides may end."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import pytest

from loopwright.compat.lightning.check import program
from loopwright.compat.lightning.check.child_program import Outcome
from loopwright.compat.lightning.check.compare import Trace, TraceEvent
from loopwright.compat.lightning.check.program import ProgramCheck

VERB = TraceEvent(0, "verb", "fit", 1, 0, {"callbacks": ["Callback"], "accumulated": 1, "interval": "1.0"})


def side(*losses: float, problem: str = "", num_trainers: int = 1, num_fabrics: int = 0) -> Outcome:
    found = [
        TraceEvent(n, "result", "Net.training_step", 1, n, {"value": one}) for n, one in enumerate(losses, start=1)
    ]
    verbs = [VERB] if num_trainers and losses else []
    return Outcome(Trace(found, verbs, ("2.6.6", "2.13.0"), problem, True, num_trainers, num_fabrics), problem)


def check(
    monkeypatch: pytest.MonkeyPatch, *sides: Outcome, without_parity: bool = False, **by_parity: Outcome
) -> tuple[int, str, list[str]]:
    """Return the exit code, what was said, and the sides that ran: Lightning's, ours, then those by their parity."""
    waiting, ran = list(sides), []

    def run_side(
        python: str, command: Sequence[str], folder: Path, *, steps: int, parity: str | None, timeout_s: float
    ) -> Outcome:
        ran.append(f"{python} {parity}")
        return by_parity[parity] if parity in by_parity else waiting.pop(0)

    monkeypatch.setattr(program, "run_side", run_side)
    out = io.StringIO()
    code = ProgramCheck(["train.py"], "theirs", "ours", out, without_parity=without_parity).run()
    return code, out.getvalue(), ran


def test_equal_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    code, text, ran = check(monkeypatch, side(0.5, 0.25), side(0.5, 0.25))
    assert code == 0
    assert "Equal. Compared: 1 fit, 2 losses and results." in text
    assert ran == ["theirs None", "ours 1"]


def test_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    code, text, ran = check(monkeypatch, side(0.5, 0.25), side(0.5, 0.26), side(0.5, 0.25))
    assert code == 1
    assert "First difference (call 1 of the Trainer, fit, training step 2): Net.training_step: value" in text
    assert "Lightning:  value=0.25\n  Loopwright: value=0.26" in text
    assert "No row" in text
    assert ran[2] == "theirs None"


def test_a_program_that_differs_from_itself_cannot_be_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    code, text, _ = check(monkeypatch, side(0.5, 0.25), side(0.5, 0.26), side(0.5, 0.27))
    assert code == 2
    assert "other results each time" in text


def test_errors_of_the_program_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = "File train.py, line 3\nValueError: no"
    code, text, _ = check(monkeypatch, side(0.5, problem=broken), side(0.5, problem=broken))
    assert code == 2
    assert text.count("ValueError: no") == 2
    assert "Until then both did the same" in text
    code, text, _ = check(monkeypatch, side(0.5, 0.25), side(0.5, problem=broken))
    assert code == 1
    assert "failed under Loopwright" in text


def test_programs_with_nothing_to_compare(monkeypatch: pytest.MonkeyPatch) -> None:
    code, text, _ = check(monkeypatch, side(num_trainers=0), side(num_trainers=0))
    assert (code, "no Trainer and no Fabric" in text) == (2, True)
    code, text, _ = check(monkeypatch, side(), side())
    assert (code, "called none of its methods" in text) == (2, True)
    absent = Outcome(Trace(is_absent=True), "")
    code, text, ran = check(monkeypatch, absent)
    assert (code, "has no Lightning" in text, len(ran)) == (2, True, 1)


def test_what_of_fabric_is_compared_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    sides = [side(0.5, num_trainers=0, num_fabrics=1) for _ in range(2)]
    code, text, _ = check(monkeypatch, *sides)
    assert code == 0
    assert "uses Fabric" in text


def test_without_parity_the_switch_is_found_by_trying(monkeypatch: pytest.MonkeyPatch) -> None:
    same, other = side(0.5, 0.25), side(0.5, 0.3)
    tried = {"random_numbers": other, "divided_outputs": same}
    code, text, _ = check(monkeypatch, same, same, without_parity=True, **{"0": other}, **tried)
    assert code == 0
    assert "switch divided_outputs, tried" in text
