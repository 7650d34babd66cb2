from __future__ import annotations

import json
import math
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loopwright.errors import ConfigError, DataError
from loopwright.loggers import JSONLinesLogger, read_json_lines


def lines(logger: JSONLinesLogger) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(logger.log_dir) / "metrics.jsonl").read_text().splitlines()]


def without_time(logger: JSONLinesLogger) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if key != "wall_s"} for row in lines(logger)]


ROWS: list[tuple[int, dict[str, float]]] = [
    (1, {"loss": 0.1}),
    (2, {"loss": 1 / 3, "epoch": 0}),
    (2, {"val/loss": 2.0, "epoch": 0}),
    (3, {"loss": 1e-17, "a": 5.0}),
    (4, {"loss": 0.5, "zz": math.inf}),
]


def write(logger: JSONLinesLogger, rows: list[tuple[int, dict[str, float]]]) -> None:
    for step, metrics in rows:
        logger.log_metrics(metrics, step)


def test_one_line_per_call_says_first_where_training_stands(tmp_path: Path) -> None:
    logger = JSONLinesLogger(tmp_path)
    logger.log_metrics({"loss": torch.tensor(0.25), "epoch": 1, "val": {"acc": 0.5}}, 7)
    assert logger.log_dir == str(tmp_path / "loopwright_logs" / "version_0")
    text = (Path(logger.log_dir) / "metrics.jsonl").read_text()
    assert text.startswith('{"step": 7, "epoch": 1, "wall_s": ')
    assert text.endswith(', "loss": 0.25, "val/acc": 0.5}\n')


def test_a_line_is_there_when_log_metrics_returns_and_the_file_is_only_appended_to(tmp_path: Path) -> None:
    logger = JSONLinesLogger(tmp_path)
    for count, (step, metrics) in enumerate(ROWS, start=1):
        logger.log_metrics(metrics, step)
        assert len(lines(logger)) == count
    logger.finalize("success")
    logger.log_metrics({"loss": 0.0}, 5)
    assert [row["step"] for row in lines(logger)] == [1, 2, 2, 3, 4, 5]


def test_numbers_that_are_not_finite_are_json_and_come_back(tmp_path: Path) -> None:
    logger = JSONLinesLogger(tmp_path)
    logger.log_metrics({"a": math.nan, "b": math.inf, "c": -math.inf, "d": 1e-300}, 0)
    (row,) = lines(logger)
    assert (row["a"], row["b"], row["c"], row["d"]) == ("NaN", "Infinity", "-Infinity", 1e-300)
    (back,) = read_json_lines(logger.experiment.path)
    assert math.isnan(back["a"])
    assert (back["b"], back["c"], back["d"]) == (math.inf, -math.inf, 1e-300)


def test_without_a_step_rows_are_counted(tmp_path: Path) -> None:
    logger = JSONLinesLogger(tmp_path)
    for metrics in ({"a": 1.0}, {"a": 1.0}, {"a": 1.0, "step": 9}, {"a": 1.0}):
        logger.log_metrics(metrics)
    assert [row["step"] for row in lines(logger)] == [0, 1, 9, 10]


def test_the_prefix_is_for_metrics_and_not_for_axes(tmp_path: Path) -> None:
    logger = JSONLinesLogger(tmp_path, prefix="run")
    logger.log_metrics({"a": 1.0, "epoch": 2}, 0)
    assert without_time(logger) == [{"step": 0, "epoch": 2, "run-a": 1.0}]


def test_a_bad_value_adds_no_line(tmp_path: Path) -> None:
    logger = JSONLinesLogger(tmp_path)
    with pytest.raises(ConfigError, match="'b'"):
        logger.log_metrics({"a": 1.0, "b": "x"}, 0)
    logger.log_metrics({"a": 1.0}, 0)
    assert len(lines(logger)) == 1


def test_hyperparameters_are_written_at_once(tmp_path: Path) -> None:
    logger = JSONLinesLogger(tmp_path)
    logger.log_hyperparams({"lr": 0.1})
    assert (Path(logger.log_dir) / "hparams.yaml").read_text() == "lr: 0.1\n"


@pytest.mark.parametrize("saved_after", range(len(ROWS) + 1))
@pytest.mark.parametrize("killed_after", [0, 3, 5])
def test_a_resumed_run_has_every_row_once(tmp_path: Path, saved_after: int, killed_after: int) -> None:
    whole = JSONLinesLogger(tmp_path / "a")
    write(whole, ROWS)
    killed = JSONLinesLogger(tmp_path / "b")
    write(killed, ROWS[:saved_after])
    state = killed.state_dict()
    write(killed, ROWS[saved_after : max(saved_after, killed_after)])
    with open(killed.experiment.path, "a") as file:
        file.write('{"step": 99, "lo')  # and the machine died here
    resumed = JSONLinesLogger(tmp_path / "b")
    resumed.load_state_dict(pickle.loads(pickle.dumps(state)))
    write(resumed, ROWS[saved_after:])
    if saved_after < len(ROWS):
        assert resumed.log_dir == killed.log_dir
        assert without_time(resumed) == without_time(whole)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.lists(
        st.dictionaries(st.text(min_size=1, max_size=3), st.floats() | st.integers()), min_size=1, max_size=6
    ),
    data=st.data(),
)
def test_any_numbers_come_back_and_resume_is_exact(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, float]], data: Any
) -> None:
    directory = tmp_path_factory.mktemp("run")
    cut = data.draw(st.integers(0, len(rows)))
    killed = JSONLinesLogger(directory)
    write(killed, list(enumerate(rows))[:cut])
    state = killed.state_dict()
    write(killed, list(enumerate(rows)))
    killed.finalize("failed")
    resumed = JSONLinesLogger(directory)
    resumed.load_state_dict(state)
    write(resumed, [*list(enumerate(rows))[cut:], (99, {})])
    back = [
        {key: row[key] for key in row if key not in ("wall_s", "step")}
        for row in read_json_lines(resumed.experiment.path)
    ]
    assert [repr(row) for row in back] == [repr(row) for row in [*rows, {}]]


def test_the_clock_goes_on_after_a_resume(tmp_path: Path) -> None:
    logger = JSONLinesLogger(tmp_path)
    logger.wall_s = 100.0
    logger.log_row({"a": 1.0}, 1, {"samples": 32})
    state = logger.state_dict()
    resumed = JSONLinesLogger(tmp_path)
    resumed.load_state_dict(state)
    resumed.wall_s += 1.5
    resumed.log_row({"a": 1.0}, 2, {"samples": 64})
    assert [(row["wall_s"], row["samples"]) for row in lines(resumed)] == [(100.0, 32), (101.5, 64)]


def test_nothing_is_dropped_before_the_resumed_run_writes(tmp_path: Path) -> None:
    before = JSONLinesLogger(tmp_path)
    write(before, ROWS[:2])
    state = before.state_dict()
    write(before, ROWS[2:])
    after = JSONLinesLogger(tmp_path)
    after.load_state_dict(state)
    assert after.state_dict() == state
    after.finalize("failed")
    assert len(lines(before)) == 5


def test_a_moved_run_is_found_and_another_run_is_not_taken_for_it(tmp_path: Path) -> None:
    before = JSONLinesLogger(tmp_path / "old")
    write(before, ROWS[:2])
    state = before.state_dict()
    shutil.move(tmp_path / "old", tmp_path / "new")
    moved = JSONLinesLogger(tmp_path / "new")
    moved.load_state_dict(state)
    write(moved, ROWS[2:])
    assert len(lines(moved)) == 5
    other = JSONLinesLogger(tmp_path / "other")
    write(other, [(1, {"loss": 9.0}), (2, {"loss": 9.0}), (3, {"loss": 9.0})])
    stranger = JSONLinesLogger(tmp_path / "other")
    stranger.load_state_dict(state)
    assert stranger.version == 1


def test_the_file_of_an_earlier_run_is_kept(tmp_path: Path) -> None:
    write(JSONLinesLogger(tmp_path, version="mine"), ROWS[:1])
    logger = JSONLinesLogger(tmp_path, version="mine")
    with pytest.warns(UserWarning, match=r"metrics\.1\.jsonl"):
        write(logger, ROWS[:2])
    assert len(lines(logger)) == 2


def test_above_rank_zero_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    logger = JSONLinesLogger(tmp_path)
    write(logger, ROWS)
    logger.log_hyperparams({"lr": 1})
    logger.log_image("x", torch.zeros(2, 2))
    logger.log_text("x", "y")
    logger.finalize("success")
    assert logger.state_dict() == {}
    assert not list(tmp_path.iterdir())


def test_a_pickled_logger_goes_on_in_the_file(tmp_path: Path) -> None:
    logger = JSONLinesLogger(tmp_path)
    write(logger, ROWS[:2])
    again = pickle.loads(pickle.dumps(logger))
    write(again, ROWS[2:])
    assert len(lines(logger)) == 5


def test_a_full_disk_keeps_complete_lines(tmp_path: Path) -> None:
    code = f"""
import resource, signal
from loopwright.loggers import JSONLinesLogger
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (120, resource.RLIM_INFINITY))
logger = JSONLinesLogger({str(tmp_path)!r})
try:
    for step in range(9):
        logger.log_metrics({{"a": 1.0}}, step)
except OSError:
    print(step)
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True, text=True)
    written = list(read_json_lines(tmp_path / "loopwright_logs" / "version_0" / "metrics.jsonl"))
    assert 0 < len(written) == int(done.stdout)


def test_a_damaged_line_is_named_and_an_unfinished_last_one_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2')
    assert list(read_json_lines(path)) == [{"step": 1}]
    path.write_text('{"step": 1}\nnonsense\n{"step": 3}\n')
    with pytest.raises(DataError, match="line 2"):
        list(read_json_lines(path))


def test_pictures_and_text_are_files_beside_the_metrics(tmp_path: Path) -> None:
    from PIL import Image

    logger = JSONLinesLogger(tmp_path)
    logger.log_metrics({"a": 1.0}, 5)
    logger.log_image("val/samples", [torch.ones(3, 4, 6), torch.zeros(4, 6)], caption=["white", "black"])
    logger.log_text("notes", "hello", step=9)
    media = Path(logger.log_dir) / "media"
    assert sorted(str(path.relative_to(media)) for path in media.rglob("*.*")) == [
        "notes/9.txt", "val/samples/5-0.png", "val/samples/5-0.txt", "val/samples/5-1.png", "val/samples/5-1.txt",
    ]  # fmt: skip
    white = Image.open(media / "val" / "samples" / "5-0.png")
    assert (white.size, white.getpixel((0, 0))) == ((6, 4), (255, 255, 255))
    assert (media / "notes" / "9.txt").read_text() == "hello"
    with pytest.raises(ConfigError, match="inside"):
        logger.log_text("../../away", "x")
