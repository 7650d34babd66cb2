"""benchmarks/language_models/: what is read from programs, how rounds are joined; measuring needs .venv-peers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = str(Path(__file__).resolve().parents[3] / "benchmarks")


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> Any:
    # At the end: names there may be those of test support.
    monkeypatch.setattr(sys, "path", [*sys.path, BENCHMARKS])
    from language_models import peers

    return peers


@pytest.mark.parametrize(
    "line",
    [
        "step 3 loss 7.1250",
        "Epoch 1 | iter 3 step 3 | loss train: 7.125, val: n/a | iter time: 12.30 ms (step)",
    ],
    ids=["own", "litgpt"],
)
def test_a_line_of_each_program_is_a_step(peers: Any, line: str) -> None:
    found = peers.STEP.search(line)
    assert (found[1], float(found[2])) == ("3", 7.125)


def test_the_first_step_is_start_and_not_counted_in_the_speed(peers: Any) -> None:
    marks = [peers.Mark(step, 10.0 + 2 * step, 8.0 + step, 2**20 * step, 5.0 - step) for step in range(1, 6)]
    row = peers.numbers(marks, 1000)
    assert row["tokens_per_s"] == 800 / 8
    assert row["cpu_s_per_1000"] == 4 / 0.8
    assert (row["first_step_s"], row["first_step_cpu_s"], row["peak_mib"]) == (12.0, 9.0, 5.0)
    assert (row["first_loss"], row["last_loss"]) == (4.0, 2.0)


def test_each_round_begins_with_another_program(peers: Any) -> None:
    order = list(peers.turns(len(peers.WORKLOADS["equal"])))
    firsts = [program for at, (workload, program) in enumerate(order) if workload == "equal" and at % 11 == 0]
    assert sorted(firsts) == sorted(peers.WORKLOADS["equal"])


def test_a_program_that_runs_is_measured_and_one_that_fails_is_an_error(peers: Any, tmp_path: Path) -> None:
    steps = "for n in (1, 2, 2, 3): print(f'step {n} loss {4 - n}.5', flush=True); sum(range(10**6))"
    marks = peers.run([sys.executable, "-c", steps], tmp_path / "out")
    assert [mark.step for mark in marks] == [1, 2, 3]
    assert marks[-1].loss == 1.5
    if sys.platform == "linux":
        assert marks[-1].cpu_s > 0
        assert marks[-1].peak_bytes > 2**20
    with pytest.raises(RuntimeError, match="no such model"):
        peers.run([sys.executable, "-c", "raise SystemExit('no such model')"], tmp_path / "out")


def test_no_ranking_where_the_spread_is_larger_than_the_difference(peers: Any) -> None:
    from language_models.report import ranking

    assert ranking([100, 102, 101], [80, 81, 79]) == 101 / 80
    assert ranking([100, 130, 101], [80, 81, 79]) is None
    assert ranking([100, 102, 101], [80, 81, 110]) is None
    assert ranking([100], [50]) is None


def test_section_has_both_tables(peers: Any) -> None:
    from language_models.report import describe_recipes

    row = {"steps": 30, "cpu_s_per_1000": 1.0, "peak_mib": 500.0, "first_step_s": 4.0, "first_step_cpu_s": 3.0}
    fast, slow = ({**row, "tokens_per_s": speed, "last_loss": 5.0} for speed in (1000.0, 500.0))
    runs = {
        workload: {program: [fast if program == "recipe" else slow] * 3 for program in programs}
        for workload, programs in peers.WORKLOADS.items()
    }
    sizes = {"samples": 120, "trained_tokens": 15360}
    inputs = {"parameters": 3_000_000, "logits_difference": 1e-6, "equal": sizes, "different": sizes}
    text = "\n".join(describe_recipes({"inputs": inputs, "versions": {"trl": "1"}, "rounds": 3, "workloads": runs}))
    assert "2.00 of `litgpt finetune_full`" in text
    assert "peak memory: no ranking against" in text
    assert "Not measured" in "\n".join(describe_recipes({"skipped": "there is no .venv-peers"}))


def test_data_have_the_lengths_that_they_are_named_after(peers: Any) -> None:
    from language_models import inputs

    def length(record: dict[str, str]) -> int:
        return len((record["instruction"] + record["output"]).split()) + 1

    assert {length(record) for record in inputs.equal_lengths(20)} == {inputs.LENGTH}
    lengths = {length(record) for record in inputs.different_lengths(20)}
    assert len(lengths) > 5
    assert max(lengths) <= inputs.LENGTH
