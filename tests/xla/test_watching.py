"""What a user sees of XLA at work: traces, counters, reports; and that the host does not wait for the devices."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from processes import run_task

run = partial(run_task, program=Path(__file__).with_name("watching_tasks.py"))


def test_a_trace_names_the_steps_and_the_counters_are_logged(tmp_path: Path) -> None:
    found = run(tmp_path, "watched", 2)
    assert found["traces"] == 1
    for name in (b"run_training_step", b"training_step", b"backward", b"validation_step", b"step_num"):
        assert name in found["trace"]
    rows = found["rows"]
    assert [int(row["step"]) for row in rows] == list(range(4, 4 * len(rows) + 1, 4))
    # The first epochs have first forms of graphs; a steady run compiles nothing, and reads no single numbers. Losses
    # are looked at in packs, with a form for each number of them: an epoch's end may bring one more.
    compiled = [float(row["XLAStatsMonitor/compiled_graphs"]) for row in rows[3:]]
    assert compiled[-1] - compiled[0] <= 1
    assert len({row["XLAStatsMonitor/reads"] for row in rows[1:]}) == 1
    executions = [float(row["XLAStatsMonitor/executions"]) for row in rows]
    assert executions == sorted(set(executions))


def test_xla_debug_reports_what_is_compiled_and_leaves_the_environment_as_it_was(tmp_path: Path) -> None:
    found = run(tmp_path, "reported", 1)
    assert "Compilation Analysis" in found["text"]
    assert "mark_step" in found["text"]  # where the graph was cut
    assert found["same"]


def test_a_batch_is_sent_while_the_step_before_it_runs(tmp_path: Path) -> None:
    sending_s, rest_s = run(tmp_path, "sent_ahead", 2)
    assert sending_s < rest_s
