"""Which metrics share a chart, and how curves become shorter."""

from __future__ import annotations

import math

import pytest

from loopwright.report.charts import base_of, extremes, make_charts, not_finite, smoothed, thin, with_speed
from loopwright.report.runs import LoggedRun, Series


def run_with(*names: str) -> LoggedRun:
    return LoggedRun("run", series={name: Series(name, [0], [1.0]) for name in names})


@pytest.mark.parametrize(
    "name",
    ["loss", "train_loss", "val_loss", "train/loss", "loss_step", "train_loss_epoch", "loss/val", "validation-loss"]
    + ["val_loss/dataloader_idx_1"],
)
def test_training_and_validation_share_a_chart(name: str) -> None:
    assert base_of(name) == "loss"


@pytest.mark.parametrize("name", ["train", "val", "trainable", "value", "testing_x", "lossy", "step"])
def test_other_names_are_left_as_they_are(name: str) -> None:
    assert base_of(name) == name


def test_charts_stand_under_their_headings_and_the_loss_comes_first() -> None:
    run = run_with(
        "acc", "val_loss", "train_loss", "lr-Adam/pg1", "lr-Adam/pg2", "lr-Adam/pg1-momentum", "grad_norm",
        "train/device/samples_per_sec", "train/device/mfu", "DeviceStatsMonitor.on_train_batch_start/cpu_percent",
    )  # fmt: skip
    assert [(chart.heading, chart.title, len(chart.names)) for chart in make_charts([run])] == [
        ("Metrics", "loss", 2),
        ("Metrics", "acc", 1),
        ("Learning rate and schedules", "learning rate", 2),
        ("Learning rate and schedules", "momentum", 1),
        ("Throughput", "device/mfu", 1),
        ("Throughput", "device/samples_per_sec", 1),
        ("Gradients and weights", "grad_norm", 1),
        ("Machine", "DeviceStatsMonitor.on_train_batch_start/cpu_percent", 1),
    ]


def test_charts_are_those_of_all_runs() -> None:
    (chart,) = make_charts([run_with("train_loss"), run_with("val_loss")])
    assert chart.names == ["train_loss", "val_loss"]


def test_a_short_curve_is_drawn_as_it_is() -> None:
    curve = thin(Series("x", [1, 2, 3], [1.0, math.nan, math.inf]), 3)
    assert curve.values == [1.0, None, None]
    assert not curve.is_thinned


def test_a_long_curve_keeps_its_means_and_its_spikes() -> None:
    values = [float(step % 10) for step in range(100_000)]
    values[54_321], values[77_777] = 1e6, math.nan
    curve = thin(Series("x", list(range(100_000)), values), 1000)
    assert len(curve.steps) == len(curve.values) == len(curve.low) == len(curve.high) == 1000
    assert curve.steps == sorted(curve.steps)
    assert curve.values[0] == pytest.approx(4.5)
    assert (curve.low[0], curve.high[0]) == (0.0, 9.0)
    assert max(value for value in curve.high if value is not None) == 1e6


def test_huge_values_have_a_mean() -> None:
    assert thin(Series("x", list(range(4)), [1.7e308] * 4), 2).values == [1.7e308, 1.7e308]


def test_extremes_leave_out_what_is_not_finite() -> None:
    series = Series("x", [0, 1, 2, 3], [2.0, -1.0, math.nan, math.inf])
    assert extremes(series) == ((-1.0, 1), (-1.0, 1), (2.0, 0))
    assert not_finite(series) == [2, 3]
    assert extremes(Series("x", [0], [math.nan])) is None


def test_smoothing_has_no_bias_at_its_start() -> None:
    assert smoothed([3.0] * 5, 0.9) == pytest.approx([3.0] * 5)
    assert smoothed([1.0, 2.0], 0.0) == [1.0, 2.0]
    assert smoothed([0.0, 1.0], 0.5) == pytest.approx([0.0, 2 / 3])


def test_speed_comes_from_the_clock_if_nothing_else_was_logged() -> None:
    run = run_with("loss")
    run.axes["time"] = ([0, 10, 20, 21, 40], [0.0, 1.0, 2.0, 2.01, 6.0])
    with_speed(run)
    assert run.series["steps_per_sec"] == Series("steps_per_sec", [10, 20, 40], [10.0, 10.0, 5.0])
    other = run_with("loss", "samples_per_sec")
    other.axes["time"] = run.axes["time"]
    with_speed(other)
    assert "steps_per_sec" not in other.series
