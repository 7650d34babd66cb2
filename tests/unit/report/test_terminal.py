"""The curves in a terminal."""

from __future__ import annotations

import io
import math
import re
from pathlib import Path

import pytest
from rich.console import Console

from loopwright.errors import ConfigError
from loopwright.report.runs import LoggedRun, RunReader, Series, read_runs
from loopwright.report.terminal import NO_LIMIT, render_terminal, watch

from .toy_runs import falling, write_lines


def shown(
    runs: list[LoggedRun], *, width: int = 100, height: int = NO_LIMIT, color: bool = False, **options: object
) -> str:
    out = io.StringIO()
    console = Console(file=out, width=width, height=100, force_terminal=color, color_system="256" if color else None)
    console.print(render_terminal(runs, (width, height), **options))  # type: ignore[arg-type]
    return out.getvalue()


def falling_run(name: str = "run", *names: str) -> LoggedRun:
    names = names or ("train_loss",)
    series = {one: Series(one, list(range(100)), falling(100)) for one in names}
    return LoggedRun(name, [Path(name)], ["CSV"], series)


def dots(text: str) -> list[list[int]]:
    """Return for each line of a curve the columns in which it has dots."""
    lines = [line.split("│", 1)[1] for line in text.splitlines() if "│" in line]
    return [[column for column, mark in enumerate(line) if 0x2800 < ord(mark) <= 0x28FF] for line in lines]


def test_a_falling_curve_falls() -> None:
    rows = dots(shown([falling_run()], width=60))
    assert len(rows) == 16
    assert all(rows)
    middles = [sum(row) / len(row) for row in rows]
    assert middles == sorted(middles)
    assert rows[0][0] == 0
    assert rows[-1][-1] >= 46


@pytest.mark.parametrize("value", [3.0, 0.001, 0.0, -5.0, 1e-12, 1e300])
def test_a_constant_curve_is_one_line_in_the_middle(value: float) -> None:
    values = [value, value * (1 + 1e-12), value]
    run = LoggedRun("run", series={"x": Series("x", [0, 5, 9], values)})
    text = shown([run], width=60)
    rows = dots(text)
    assert [number for number, row in enumerate(rows) if row] in ([7], [8])
    assert f"{value + (0.1 * abs(value) or 1.0):.4g} │" in text
    assert len(max(rows, key=len)) == 60 - 13


def test_one_point_is_one_dot() -> None:
    run = LoggedRun("run", series={"x": Series("x", [4], [3.0])})
    assert sum(map(len, dots(shown([run], width=60)))) == 1


def test_values_and_facts_are_written(trained: Path) -> None:
    (run,) = read_runs([trained])
    text = shown([run])
    for fact in ("line", "step 23", "epoch 2", "checkpoints", "best", "loss", "learning rate"):
        assert fact in text
    assert f"val_loss {run.series['val_loss'].values[-1]:.4g}" in text


def test_runs_have_colours_and_names() -> None:
    text = shown([falling_run("one"), falling_run("two")], color=True)
    assert "one train_loss" in text
    assert "two train_loss" in text
    assert len(set(re.findall(r"\x1b\[[0-9;]*m(?=━)", text))) == 2


def test_charts_stand_beside_each_other_where_there_is_room() -> None:
    run = falling_run("run", "a", "b")
    assert len(dots(shown([run], width=120))) == 16
    assert len(dots(shown([run], width=80))) == 32


@pytest.mark.parametrize("size", [(40, 10), (80, 24), (150, 24), (10, 3)])
def test_what_is_shown_fits_into_the_terminal(size: tuple[int, int]) -> None:
    run = falling_run("run", *"abcdefghijkl")
    text = shown([run], width=size[0], height=size[1])
    assert max(map(len, text.splitlines())) <= size[0]
    assert len(text.splitlines()) <= max(size[1], 14)  # one chart is shown in any case
    assert re.search(r"\d+ more", text)


def test_metrics_are_chosen_by_patterns() -> None:
    run = falling_run("run", "train_loss", "val_loss", "acc")
    text = shown([run], metrics=["val*"])
    assert "val_loss" in text
    assert "train_loss" not in text
    assert "acc" not in text
    with pytest.raises(ConfigError, match="No metric is named 'los'") as caught:
        shown([run], metrics=["los"])
    assert "train_loss" in caught.value.fix


def test_what_is_not_finite_is_left_out() -> None:
    run = LoggedRun("run", series={"x": Series("x", [0, 1, 2], [math.nan] * 3)})
    assert "no finite value" in shown([run])


def test_a_smoothing_out_of_range_is_an_error() -> None:
    with pytest.raises(ConfigError, match="smoothing=1"):
        shown([falling_run()], smoothing=1.0)


def test_watching_follows_a_run_from_before_its_first_value(tmp_path: Path) -> None:
    out = io.StringIO()
    console = Console(file=out, width=80, height=40, force_terminal=True, color_system=None)
    screens: list[str] = []

    def go_on() -> bool:
        screens.append(out.getvalue())
        out.truncate(out.seek(0))
        write_lines(tmp_path, [{"step": len(screens), "loss": 1.0 / len(screens)}])
        return len(screens) == 3

    watch(RunReader([tmp_path]), console, every_s=0.001, should_stop=go_on)
    assert "Nothing has been logged yet" in screens[0]
    assert "step 1" in screens[1]
    assert "step 2" in screens[2]
    assert "loss 0.5" in screens[2]


def test_watching_waits_for_a_metric_that_comes_later(tmp_path: Path) -> None:
    out = io.StringIO()
    console = Console(file=out, width=80, height=40, force_terminal=True, color_system=None)
    write_lines(tmp_path, [{"step": 1, "loss": 1.0}])
    answers = iter([False, True])

    def go_on() -> bool:
        write_lines(tmp_path, [{"step": 2, "val_loss": 0.25}])
        return next(answers)

    watch(RunReader([tmp_path]), console, every_s=0.001, metrics=["val*"], should_stop=go_on)
    assert "No metric is named 'val*'" in out.getvalue()
    assert "val_loss 0.25" in out.getvalue()


def test_where_there_is_no_terminal_it_is_printed_once(trained: Path) -> None:
    out = io.StringIO()
    watch(RunReader([trained]), Console(file=out, width=80))
    assert out.getvalue().count("step 23") == 1
    assert "\x1b" not in out.getvalue()
