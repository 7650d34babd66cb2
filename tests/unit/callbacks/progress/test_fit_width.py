"""Metrics on lines below a bar."""

from __future__ import annotations

from loopwright.callbacks.progress.fit_width import fold


def test_what_fits_is_one_line() -> None:
    assert fold(["a=1", "b=2"], ", ", 8) == ["a=1, b=2"]


def test_metrics_stay_whole() -> None:
    assert fold(["a=1", "b=2"], ", ", 7) == ["a=1", "b=2"]


def test_a_metric_that_is_too_long_is_cut() -> None:
    assert fold(["accuracy=1"], ", ", 5) == ["accu…"]


def test_after_three_lines_the_rest_is_left_out() -> None:
    lines = fold([f"metric={n}" for n in range(9)], " ", 17)
    assert lines == ["metric=0 metric=1", "metric=2 metric=3", "metric=4 metric=…"]
    assert fold([f"metric={n}" for n in range(9)], " ", 10)[-1] == "metric=2 …"


def test_nothing_has_no_line() -> None:
    assert fold([], " ", 80) == []
