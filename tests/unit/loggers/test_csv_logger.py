from __future__ import annotations

import csv
import json
import math
import os
import pickle
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loopwright.errors import ConfigError
from loopwright.loggers import CSVLogger


def text_of(logger: CSVLogger) -> str:
    return (Path(logger.log_dir) / "metrics.csv").read_text()


def write(logger: CSVLogger, rows: list[tuple[int, dict[str, float]]]) -> None:
    for step, metrics in rows:
        logger.log_metrics(metrics, step)


ROWS: list[tuple[int, dict[str, float]]] = [
    (1, {"loss": 0.1}),
    (2, {"loss": 1 / 3, "epoch": 0}),
    (2, {"val/loss": 2.0, "epoch": 0}),
    (3, {"loss": 1e-17, "a": 5.0}),
    (4, {"loss": 0.5, "zz": math.inf}),
]


def uninterrupted(directory: Path) -> str:
    logger = CSVLogger(directory)
    write(logger, ROWS)
    logger.finalize("success")
    return text_of(logger)


def test_one_sorted_row_per_call_with_every_digit(tmp_path: Path) -> None:
    assert uninterrupted(tmp_path) == (
        "a,epoch,loss,step,val/loss,zz\n"
        ",,0.1,1,,\n"
        ",0,0.3333333333333333,2,,\n"
        ",0,,2,2.0,\n"
        "5.0,,1e-17,3,,\n"
        ",,0.5,4,,inf\n"
    )


def test_nan_shows_as_nan(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    logger.log_metrics({"loss": torch.tensor(float("nan"))}, 0)
    logger.save()
    assert text_of(logger) == "loss,step\nnan,0\n"


def test_what_is_on_disk_is_appended_to(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, flush_logs_every_n_steps=1)
    logger.log_metrics({"a": 1.0}, 0)
    inode = os.stat(logger.experiment.metrics_file_path).st_ino
    logger.log_metrics({"a": 2.0}, 1)
    assert os.stat(logger.experiment.metrics_file_path).st_ino == inode
    logger.log_metrics({"b": 2.0}, 2)
    assert text_of(logger) == "a,b,step\n1.0,,0\n2.0,,1\n,2.0,2\n"
    assert sorted(os.listdir(logger.log_dir)) == ["metrics.csv"]


def test_rows_wait_for_the_flush_interval(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, flush_logs_every_n_steps=10)
    write(logger, [(step, {"a": 1.0}) for step in range(0, 10, 3)])
    assert text_of(logger).count("\n") == 2
    logger.log_metrics({"a": 1.0}, 12)
    assert text_of(logger).count("\n") == 6
    write(logger, [(12, {"a": 1.0})] * 9)
    assert text_of(logger).count("\n") == 6
    logger.log_metrics({"a": 1.0}, 12)
    assert text_of(logger).count("\n") == 16


@pytest.mark.parametrize("how", ["save", "finalize"])
def test_save_and_finalize_write_what_is_pending(tmp_path: Path, how: str) -> None:
    logger = CSVLogger(tmp_path)
    write(logger, [(0, {"a": 1.0}), (1, {"a": 2.0})])
    logger.save() if how == "save" else logger.finalize("failed")
    assert text_of(logger) == "a,step\n1.0,0\n2.0,1\n"


def test_without_a_step_rows_are_counted(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    logger.log_metrics({"a": 1.0})
    logger.log_metrics({"a": 1.0})
    logger.log_metrics({"a": 1.0}, 7)
    logger.log_metrics({"a": 1.0})
    logger.log_metrics({"a": 1.0, "step": 9})
    logger.save()
    assert [row["step"] for row in csv.DictReader(text_of(logger).splitlines())] == ["0", "1", "7", "8", "9"]


def test_prefix(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, prefix="run")
    logger.log_metrics({"a": 1.0}, 0)
    assert text_of(logger) == "run-a,step\n1.0,0\n"


def test_a_bad_value_adds_no_row(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    with pytest.raises(ConfigError, match="'b'"):
        logger.log_metrics({"a": 1.0, "b": "x"}, 0)
    assert logger.experiment.metrics == []


@pytest.mark.parametrize("value", [0, -1, 1.5, None])
def test_bad_flush_interval(value: Any) -> None:
    with pytest.raises(ConfigError, match="flush_logs_every_n_steps"):
        CSVLogger("logs", flush_logs_every_n_steps=value)


def test_hyperparameters_are_written_at_once(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    logger.log_hyperparams({"lr": 0.1})
    logger.log_hyperparams({"model": {"width": 3}})
    assert (Path(logger.log_dir) / "hparams.yaml").read_text() == "lr: 0.1\nmodel:\n  width: 3\n"


def test_the_file_of_an_earlier_run_is_kept(tmp_path: Path) -> None:
    for number in range(3):
        logger = CSVLogger(tmp_path, version="mine")
        if number:
            with pytest.warns(UserWarning, match=rf"metrics\.{number}\.csv"):
                logger.log_metrics({"a": float(number)}, 0)
        else:
            logger.log_metrics({"a": float(number)}, 0)
    directory = Path(logger.log_dir)
    contents = [(directory / name).read_text() for name in ("metrics.csv", "metrics.1.csv", "metrics.2.csv")]
    assert contents == ["a,step\n2.0,0\n", "a,step\n0.0,0\n", "a,step\n1.0,0\n"]


@pytest.mark.parametrize("saved_after", range(len(ROWS) + 1))
@pytest.mark.parametrize("killed_after", range(len(ROWS) + 1))
def test_a_resumed_run_ends_with_the_same_bytes(tmp_path: Path, saved_after: int, killed_after: int) -> None:
    killed = CSVLogger(tmp_path / "b", flush_logs_every_n_steps=1)
    write(killed, ROWS[:saved_after])
    state = killed.state_dict()
    write(killed, ROWS[saved_after : max(saved_after, killed_after)])
    resumed = CSVLogger(tmp_path / "b")
    resumed.load_state_dict(pickle.loads(pickle.dumps(state)))
    write(resumed, ROWS[saved_after:])
    resumed.finalize("success")
    assert resumed.log_dir == killed.log_dir
    if saved_after < len(ROWS):
        assert text_of(resumed) == uninterrupted(tmp_path / "a")


_names = st.sampled_from(["a", "b,c", 'q"', "d e", "é"])
_rows = st.lists(st.dictionaries(_names, st.floats() | st.integers(), max_size=3), min_size=1, max_size=8)


@settings(max_examples=60, deadline=None)
@given(rows=_rows, extra=_rows, data=st.data())
def test_resume_is_exact_for_any_rows(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, float]], extra: list[dict[str, float]], data: Any
) -> None:
    directory = tmp_path_factory.mktemp("run")
    cut = data.draw(st.integers(0, len(rows) - 1))
    intervals = st.sampled_from([1, 2, 100])
    whole = CSVLogger(directory / "a", flush_logs_every_n_steps=data.draw(intervals))
    write(whole, list(enumerate(rows)))
    whole.save()
    killed = CSVLogger(directory / "b", flush_logs_every_n_steps=data.draw(intervals))
    write(killed, list(enumerate(rows))[:cut])
    state = killed.state_dict()
    write(killed, list(enumerate(extra, start=cut)))
    resumed = CSVLogger(directory / "b", flush_logs_every_n_steps=data.draw(intervals))
    resumed.load_state_dict(state)
    write(resumed, list(enumerate(rows))[cut:])
    resumed.save()
    assert text_of(resumed) == text_of(whole)


def test_the_state_holds_plain_values(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    write(logger, ROWS)
    state = logger.state_dict()
    assert state == {
        "log_dir": os.path.abspath(logger.log_dir),
        "version": 0,
        "step": 4,
        "rows": 5,
        "columns": ["a", "epoch", "loss", "step", "val/loss", "zz"],
        "last_row": {"loss": "0.5", "step": "4", "zz": "inf"},
    }
    assert text_of(logger).count("\n") == 6


def test_nothing_is_dropped_before_the_resumed_run_writes(tmp_path: Path) -> None:
    before = CSVLogger(tmp_path)
    write(before, ROWS[:2])
    state = before.state_dict()
    write(before, ROWS[2:])
    before.save()
    after = CSVLogger(tmp_path)
    after.load_state_dict(state)
    assert after.state_dict() == state
    after.finalize("failed")
    assert text_of(before).count("\n") == 6


def test_a_second_fit_with_the_same_logger_goes_back_too(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    write(logger, ROWS[:2])
    state = logger.state_dict()
    write(logger, [(3, {"other": 1.0})])
    logger.load_state_dict(state)
    write(logger, ROWS[2:])
    logger.save()
    assert text_of(logger) == uninterrupted(tmp_path / "a")


def test_a_moved_run_is_found(tmp_path: Path) -> None:
    before = CSVLogger(tmp_path / "old")
    write(before, ROWS[:2])
    state = before.state_dict()
    shutil.move(tmp_path / "old", tmp_path / "new")
    after = CSVLogger(tmp_path / "new")
    after.load_state_dict(state)
    write(after, ROWS[2:])
    after.save()
    assert after.version == 0
    assert text_of(after) == uninterrupted(tmp_path / "a")


def test_a_missing_directory_is_said_and_a_fresh_one_taken(tmp_path: Path) -> None:
    before = CSVLogger(tmp_path)
    write(before, ROWS)
    state = before.state_dict()
    shutil.rmtree(before.log_dir)
    after = CSVLogger(tmp_path)
    with pytest.warns(UserWarning, match="starts a new run"):
        after.load_state_dict(state)
    after.log_metrics({"a": 1.0})
    assert text_of(after) == "a,step\n1.0,0\n"


def test_another_runs_file_at_that_place_is_left_alone(tmp_path: Path) -> None:
    before = CSVLogger(tmp_path)
    write(before, ROWS)
    state = before.state_dict()
    other = "loss,step\n" + "9.0,9\n" * 9
    (Path(before.log_dir) / "metrics.csv").write_text(other)
    after = CSVLogger(tmp_path)
    with pytest.warns(UserWarning, match="does not contain what was logged"):
        after.load_state_dict(state)
    after.log_metrics({"a": 1.0}, 5)
    assert (after.version, text_of(before)) == (1, other)


def test_a_version_that_was_asked_for_is_honoured_on_resume(tmp_path: Path) -> None:
    before = CSVLogger(tmp_path, version="a")
    write(before, ROWS)
    state = before.state_dict()
    after = CSVLogger(tmp_path, version="b")
    after.load_state_dict(state)
    after.log_metrics({"x": 1.0}, 5)
    assert text_of(after) == "step,x\n5,1.0\n"
    assert Path(after.log_dir).name == "b"
    assert text_of(before).count("\n") == 6


def test_another_save_dir_never_touches_a_run_that_lies_there(tmp_path: Path) -> None:
    before = CSVLogger(tmp_path / "a")
    write(before, ROWS)
    state = before.state_dict()
    stranger = CSVLogger(tmp_path / "b")
    write(stranger, [(step, {"y": 1.0}) for step in range(9)])
    stranger.save()
    after = CSVLogger(tmp_path / "b")
    after.load_state_dict(state)
    after.log_metrics({"x": 1.0}, 5)
    assert after.version == 1
    assert text_of(stranger).count("\n") == 10


def test_an_empty_state_changes_nothing(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    logger.load_state_dict({})
    logger.log_metrics({"a": 1.0}, 0)
    assert logger.version == 0


def test_a_full_disk_leaves_complete_rows_and_loses_none(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, flush_logs_every_n_steps=1)
    logger.log_metrics({"a": 1.0}, 0)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(text_of(logger)) + 3, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            logger.log_metrics({"a": 2.0}, 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, ignored)
    assert text_of(logger) == "a,step\n1.0,0\n"
    logger.log_metrics({"a": 3.0}, 2)
    assert text_of(logger) == "a,step\n1.0,0\n2.0,1\n3.0,2\n"


def test_a_torn_last_row_is_dropped_on_resume(tmp_path: Path) -> None:
    before = CSVLogger(tmp_path)
    write(before, ROWS[:3])
    state = before.state_dict()
    with open(before.experiment.metrics_file_path, "a") as file:
        file.write('5.0,"x')
    after = CSVLogger(tmp_path)
    after.load_state_dict(state)
    write(after, ROWS[3:])
    after.save()
    assert text_of(after) == uninterrupted(tmp_path / "a")


def test_a_logger_survives_pickling_with_its_pending_rows(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    write(logger, ROWS[:2])
    copied = pickle.loads(pickle.dumps(logger))
    write(copied, ROWS[2:])
    copied.save()
    assert text_of(copied) == uninterrupted(tmp_path / "a")


def test_kill_inside_a_header_change_then_resume_gives_the_same_bytes(tmp_path: Path) -> None:
    # The child dies between writing a new header to the temporary file and the rename.
    code = f"""
import json, os, signal
from loopwright.loggers import CSVLogger
logger = CSVLogger({str(tmp_path / "b")!r}, flush_logs_every_n_steps=1)
for step in range(30):
    if step == 10:
        json.dump(logger.state_dict(), open({str(tmp_path / "state.json")!r}, "w"))
    if step == 21:
        os.replace = lambda *a: os.kill(os.getpid(), signal.SIGKILL)
    logger.log_metrics({{f"m{{step // 7}}": step / 3}}, step)
"""
    done = subprocess.run([sys.executable, "-c", code], timeout=60)
    assert done.returncode == -signal.SIGKILL
    rows = [(step, {f"m{step // 7}": step / 3}) for step in range(30)]
    resumed = CSVLogger(tmp_path / "b")
    resumed.load_state_dict(json.loads((tmp_path / "state.json").read_text()))
    write(resumed, rows[10:])
    resumed.save()
    whole = CSVLogger(tmp_path / "a")
    write(whole, rows)
    whole.save()
    assert text_of(resumed) == text_of(whole)
