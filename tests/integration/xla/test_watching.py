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
    # are looked at in packs, with a form for each number of them (at most 4, the steps of an epoch), and when they come
    # depends on the time: without repeated forms these rows would show 4 graphs each.
    assert len(rows) >= 24
    compiled = [float(row["XLAStatsMonitor/compiled_graphs"]) for row in rows[8:]]
    assert compiled[-1] - compiled[0] <= 4
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


def test_steps_that_read_or_never_repeat_are_named_once(tmp_path: Path) -> None:
    found = run(tmp_path, "warned", 1)
    assert found["nothing"] == ([], True)  # the largest loss of the epoch is the largest of them
    [reads], _ = found["reads"]
    program = Path(__file__).with_name("watching_tasks.py")
    line = 1 + next(
        number for number, text in enumerate(program.read_text().splitlines()) if "if self.reads and loss >" in text
    )
    assert reads.startswith(f"training_step reads a tensor in every step, at {program}:{line}, so that the host waits")
    [shapes], _ = found["shapes"]
    assert "in 11 of 20 calls of training_step" in shapes
    assert "batches have different shapes: (4, 11), (4, 12), (4, 13)." in shapes


def test_gradients_of_another_device_before_the_runtime_are_refused(tmp_path: Path) -> None:
    message = run(tmp_path, "gradients_before", 1)
    assert "Expected XLA's runtime to be started before the first backward pass" in message
    assert "torch_xla.device()" in message
