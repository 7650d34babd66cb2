"""What is read of each format, and what a second look reads."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest
import torch
from torch.utils.tensorboard import SummaryWriter

import loopwright as lw
from loopwright.report.sources import NumberSource, find_sources

from .toy_runs import write_csv, write_lines


def only(folder: Path) -> NumberSource:
    (source,) = find_sources(folder)
    source.refresh()
    return source


def test_a_csv_is_read_as_it_was_logged(tmp_path: Path) -> None:
    values = [0.1 + 0.2, math.nan, math.inf, 1e-300]
    source = only(write_csv(tmp_path, {"loss": values}, every=10))
    assert list(source.points["loss"]) == [0, 10, 20, 30]
    assert [repr(value) for value in source.points["loss"].values()] == [repr(value) for value in values]
    assert source.problems == []


def test_cells_that_are_empty_are_no_points(tmp_path: Path) -> None:
    logger = lw.CSVLogger(tmp_path, name=None, version="")
    logger.log_metrics({"a": 1.0}, step=4)
    logger.log_metrics({"b": 2.0}, step=4)
    logger.save()
    assert only(tmp_path).points == {"a": {4: 1.0}, "b": {4: 2.0}}


def test_json_lines_give_points_and_a_clock(tmp_path: Path) -> None:
    write_lines(tmp_path, [{"step": 5, "epoch": 0, "wall_s": 1.5, "loss": 2.0}, {"step": 9, "wall_s": 3.0, "x": "NaN"}])
    source = only(tmp_path)
    assert source.points["loss"] == {5: 2.0}
    assert math.isnan(source.points["x"][9])
    assert source.clock == {5: 1.5, 9: 3.0}


def test_what_is_no_number_is_no_point(tmp_path: Path) -> None:
    write_lines(tmp_path, [{"step": 1, "loss": 2.0, "note": "good", "flag": True, "more": {"a": 1}, "none": None}])
    assert set(only(tmp_path).points) == {"loss"}


def test_a_clock_that_begins_again_goes_on_where_it_was(tmp_path: Path) -> None:
    write_lines(tmp_path, [{"step": step, "wall_s": step % 3 + 1.0, "loss": 1.0} for step in range(6)])
    assert only(tmp_path).clock == {0: 1.0, 1: 2.0, 2: 3.0, 3: 4.0, 4: 5.0, 5: 6.0}


def test_a_clock_that_counts_from_1970_begins_at_zero(tmp_path: Path) -> None:
    write_lines(tmp_path, [{"step": step, "wall_s": 1.7e9 + step, "loss": 1.0} for step in range(3)])
    assert only(tmp_path).clock == {0: 0.0, 1: 1.0, 2: 2.0}


def test_scalars_of_tensorboard_are_read_with_their_times(tmp_path: Path) -> None:
    with SummaryWriter(str(tmp_path)) as writer:
        writer.add_scalar("loss", 0.5, 0, walltime=1000.0)
        writer.add_scalar("loss", 0.25, 10, walltime=1002.0)
        writer.add_scalar("new", 3.0, 10, walltime=1002.0, new_style=True)
        writer.add_text("note", "no scalar", 10, walltime=1002.0)
        writer.add_histogram("weights", torch.ones(2), 10, walltime=1002.0)
    source = only(tmp_path)
    assert source.points == {"loss": {0: 0.5, 10: 0.25}, "new": {10: 3.0}}
    assert source.clock[10] - source.clock[0] == pytest.approx(2.0)


def test_of_a_step_that_was_logged_twice_the_last_counts(tmp_path: Path) -> None:
    write_lines(tmp_path, [{"step": 1, "loss": 2.0}, {"step": 1, "loss": 1.0}])
    assert only(tmp_path).points["loss"] == {1: 1.0}


# -- looking again ---------------------------------------------------------------------------------------------------


def test_a_second_look_reads_what_is_new_and_leaves_half_a_line(tmp_path: Path) -> None:
    source = only(write_lines(tmp_path, [{"step": 0, "loss": 2.0}]))
    with open(tmp_path / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write('{"step": 1, "lo')
        file.flush()
        assert not source.refresh()
        assert source.points["loss"] == {0: 2.0}
        file.write('ss": 1.0}\n')
    assert source.refresh()
    assert source.points["loss"] == {0: 2.0, 1: 1.0}
    assert source.problems == []


def test_a_csv_that_got_a_column_is_read_anew(tmp_path: Path) -> None:
    logger = lw.CSVLogger(tmp_path, name=None, version="")
    logger.log_metrics({"loss": 2.0}, step=0)
    logger.save()
    source = only(tmp_path)
    logger.log_metrics({"val_loss": 1.0}, step=1)
    logger.save()
    assert source.refresh()
    assert source.points == {"loss": {0: 2.0}, "val_loss": {1: 1.0}}


def test_rows_that_a_resumed_run_dropped_are_dropped_here(tmp_path: Path) -> None:
    source = only(write_lines(tmp_path, [{"step": step, "loss": 2.0} for step in range(4)]))
    size = (tmp_path / "metrics.jsonl").stat().st_size
    os.truncate(tmp_path / "metrics.jsonl", size // 2)
    write_lines(tmp_path, [{"step": 2, "loss": 1.0}])
    assert source.refresh()
    assert source.points["loss"] == {0: 2.0, 1: 2.0, 2: 1.0}


def test_new_events_are_read_and_truncated_files_are_read_again(tmp_path: Path) -> None:
    with SummaryWriter(str(tmp_path)) as writer:
        writer.add_scalar("loss", 4.0, 0)
        writer.flush()
        source = only(tmp_path)
        (file,) = tmp_path.glob("*.tfevents.*")
        size = file.stat().st_size
        writer.add_scalar("loss", 2.0, 1)
        writer.flush()
        assert source.refresh()
        assert source.points["loss"] == {0: 4.0, 1: 2.0}
        assert not source.refresh()
    os.truncate(file, size)
    assert source.refresh()
    assert source.points["loss"] == {0: 4.0}


# -- damage ----------------------------------------------------------------------------------------------------------


def test_a_damaged_line_is_named_and_the_others_are_read(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 0, "loss": 1}\n\x00\xff{\n{"step": 2, "loss": 3}\n')
    source = only(tmp_path)
    assert source.points["loss"] == {0: 1.0, 2: 3.0}
    assert "number 2" in source.problems[0]


def test_events_that_end_in_the_middle_are_read_to_there(tmp_path: Path) -> None:
    with SummaryWriter(str(tmp_path)) as writer:
        for step in range(5):
            writer.add_scalar("loss", 1.0, step)
    (file,) = tmp_path.glob("*.tfevents.*")
    os.truncate(file, file.stat().st_size - 3)
    assert list(only(tmp_path).points["loss"]) == [0, 1, 2, 3]


def test_a_file_that_vanishes_is_named(tmp_path: Path) -> None:
    source = only(write_lines(tmp_path, [{"step": 0, "loss": 1.0}]))
    (tmp_path / "metrics.jsonl").unlink()
    assert not source.refresh()
    assert "cannot be read" in source.problems[0]
    assert source.points["loss"] == {0: 1.0}
