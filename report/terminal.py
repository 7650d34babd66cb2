"""`watch`: the curves of runs in a terminal, redrawn while they are written."""

from __future__ import annotations

import fnmatch
import itertools
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ..errors import ConfigError, MissingDependency
from ..messages import counted
from .charts import Chart, make_charts, smoothed, thin, with_speed
from .page import duration
from .runs import LoggedRun, RunReader, Series

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

_COLORS = ("bright_blue", "dark_orange", "green", "magenta", "yellow", "cyan", "medium_purple1", "grey62")
_LABEL = 9  # characters of a number at the vertical axis
_LEAST_HEIGHT, _MOST_HEIGHT = 5, 16  # lines of a curve
_FRAME = 5  # lines of a chart beside its curve: title, axis, its numbers, legend, space
_LEAST_WIDTH = 48  # columns of a chart: below twice that, charts stand below each other
NO_LIMIT = 10**6  # lines of what is printed once
_EMPTY = "\u2800"  # a braille character without dots; their dots are the bits of the code


def watch(
    reader: RunReader,
    console: Console,
    *,
    every_s: float = 2.0,
    metrics: Sequence[str] = (),
    smoothing: float = 0.0,
    should_stop: Callable[[], bool] = lambda: False,
) -> None:
    """Show the runs until Ctrl-C; once if the output is not a terminal.

    Args:
        reader: Reads the runs' directories, which may still be empty.
        console: Rich's console.
        every_s: Seconds between two reads of the files.
        metrics: Shell patterns; only these metrics are shown. Empty shows all.
        smoothing: As for `write_report`.
        should_stop: Function called after each update.
    """
    if not console.is_terminal:
        size = (console.width, NO_LIMIT)
        console.print(render_terminal(reader.read(), size, metrics=metrics, smoothing=smoothing))
        return
    _check_smoothing(smoothing)
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            try:
                shown = render_terminal(reader.read(), console.size, metrics=metrics, smoothing=smoothing)
            except ConfigError as error:  # val_loss, say, comes later than train_loss
                shown = Text(str(error))
            live.update(shown, refresh=True)
            if should_stop():
                return
            time.sleep(every_s)


def render_terminal(
    runs: Sequence[LoggedRun], size: tuple[int, int], *, metrics: Sequence[str] = (), smoothing: float = 0.0
) -> RenderableType:
    """Return the curves of some runs, as many as fit into the size, for rich to print.

    Args:
        runs: From `read_runs`.
        size: Columns and lines; NO_LIMIT lines for all charts.
        metrics: Shell patterns; only these metrics are shown. Empty shows all.
        smoothing: As for `write_report`.

    Raises:
        ConfigError: The smoothing is out of range, or no metric matches the patterns.
        MissingDependency: plotille is not installed.
    """
    _check_smoothing(smoothing)
    for run in runs:
        with_speed(run)
    charts = _chosen(make_charts(runs), metrics)
    if not charts:
        return Text("Nothing has been logged yet; waiting for the first value.", style="dim")
    width, height = size
    columns = max(1, min(len(charts), width // _LEAST_WIDTH))
    lines = -(-len(charts) // columns)
    room = (height - len(runs) - 2) // lines - _FRAME
    each = max(_LEAST_HEIGHT, min(_MOST_HEIGHT, room))
    shown = charts[: max(1, (height - len(runs) - 2) // (each + _FRAME)) * columns]
    grid = Table.grid(padding=(0, 2), expand=False)
    for begin in range(0, len(shown), columns):
        part = shown[begin : begin + columns]
        grid.add_row(*(_draw(chart, runs, width // columns - 2, each, smoothing) for chart in part))
    rest = len(charts) - len(shown)
    hint = f"{counted(rest, 'more chart')}: enlarge the terminal, or pass --metric."
    more = [Text(hint, style="dim", no_wrap=True, overflow="ellipsis")] if rest else []
    return Group(*(_headline(number, run, runs) for number, run in enumerate(runs)), Text(), grid, *more)


def _check_smoothing(smoothing: float) -> None:
    if not 0 <= smoothing < 1:
        raise ConfigError(f"smoothing={smoothing!r}; expected a number from 0 to below 1.", fix="pass smoothing=0.6.")


def _chosen(charts: list[Chart], patterns: Sequence[str]) -> list[Chart]:
    if not patterns or not charts:
        return charts
    names = [name for chart in charts for name in chart.names]
    found = {name for name in names if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)}
    if not found:
        raise ConfigError(
            f"No metric is named {' or '.join(map(repr, patterns))}.", fix=f"choose among {', '.join(names)}."
        )
    kept = [Chart(chart.title, chart.heading, [n for n in chart.names if n in found]) for chart in charts]
    return [chart for chart in kept if chart.names]


def _headline(number: int, run: LoggedRun, runs: Sequence[LoggedRun]) -> Text:
    facts = [f"step {run.last_step:,}"] if run.last_step >= 0 else ["no step yet"]
    if "epoch" in run.axes:
        facts.append(f"epoch {run.axes['epoch'][1][-1]:g}")
    if run.seconds is not None:
        facts.append(duration(run.seconds))
    if run.checkpoints:
        best = next((file for file in run.checkpoints if "best" in file.roles and file.score is not None), None)
        facts.append(counted(len(run.checkpoints), "checkpoint") + ("" if best is None else f", best {best.score:.4g}"))
    facts += [f"! {problem}" for problem in run.problems]
    style = f"bold {_COLORS[number % len(_COLORS)]}" if len(runs) > 1 else "bold"
    return Text.assemble((run.name, style), "  ", ("  ".join(facts), "dim"), no_wrap=True, overflow="ellipsis")


def _draw(chart: Chart, runs: Sequence[LoggedRun], width: int, height: int, smoothing: float) -> Text:
    """Return a title, `height` lines with the vertical axis, the horizontal axis and a legend."""
    inner = max(8, width - _LABEL - 2)
    lines = []
    for number, run in enumerate(runs):
        for place, name in enumerate(chart.names):
            if name in run.series:
                points = _points(run.series[name], inner, smoothing if chart.heading == "Metrics" else 0.0)
                color = _COLORS[(place if len(runs) == 1 else number) % len(_COLORS)]
                label = name if len(runs) == 1 else f"{run.name} {name}"
                lines.append((label, color, points, run.series[name].values[-1]))
    everything = [point for _, _, points, _ in lines for point in points]
    text = Text(f"{chart.title}\n", style="", no_wrap=True, overflow="crop")
    text.stylize("bold", 0, len(chart.title))
    if not everything:
        return text.append("no finite value\n", "red")
    left, right = min(x for x, _ in everything), max(x for x, _ in everything)
    low, high = min(y for _, y in everything), max(y for _, y in everything)
    size = max(abs(low), abs(high))
    if high - low <= size * 1e-9:  # a straight line, in the middle
        margin = size * 0.1 or 1.0
        low, high = low - margin, high + margin
    cells = _cells([(points, color) for _, color, points, _ in lines], inner, height, (left, right, low, high))
    for row in range(height):
        at = high - (high - low) * row / (height - 1)
        is_labelled = row in (0, height - 1) or (row == height // 2 and height > 6)
        text.append(f"{at:>{_LABEL}.4g} " if is_labelled else " " * (_LABEL + 1), "dim").append("│", "dim")
        for mark, color in cells[row]:
            text.append(mark, color)
        text.append("\n")
    begin, end = f"{left:,}", f"{right:,}"
    text.append(" " * (_LABEL + 1) + "└" + "─" * inner + "\n", "dim")
    text.append(" " * (_LABEL + 2) + begin + end.rjust(inner - len(begin)) + "\n", "dim")
    used = 0
    for label, color, _, last in lines:
        entry = f"{label} {last:.4g}"
        if used and used + len(entry) + 2 > width:
            text.append("\n")
            used = 0
        text.append("━ ", color).append(f"{entry}   ")
        used += len(entry) + 5
    return text.append("\n")


def _points(series: Series, width: int, smoothing: float) -> list[tuple[int, float]]:
    curve = thin(series, 2 * width)  # a character has two columns of dots
    pairs = [(step, value) for step, value in zip(curve.steps, curve.values, strict=True) if value is not None]
    values = smoothed([value for _, value in pairs], smoothing)
    return [(step, value) for (step, _), value in zip(pairs, values, strict=True)]


def _cells(
    curves: Sequence[tuple[Sequence[tuple[int, float]], str]],
    width: int,
    height: int,
    limits: tuple[float, float, float, float],
) -> list[list[tuple[str, str]]]:
    """Return lines of characters with their colors; a character of several curves has the color of the last one."""
    left, right, low, high = limits
    right = max(right, left + 1)
    # The upper limits of the canvas are not part of it.
    limit_x, limit_y = right + (right - left) / (2 * width), high + (high - low) / (4 * height)
    cells = [[(_EMPTY, "")] * width for _ in range(height)]
    for points, color in curves:
        canvas = _canvas()(width, height, left, low, limit_x, limit_y)
        for (x0, y0), (x1, y1) in itertools.pairwise(points):
            canvas.line(x0, y0, x1, y1)
        if len(points) == 1:
            canvas.point(*points[0])
        for row, line in enumerate(canvas.plot(linesep="\n").split("\n")):
            for column, mark in enumerate(line[:width]):
                bits = ord(mark) - ord(_EMPTY)
                if 0 < bits < 256:
                    cells[row][column] = (chr(ord(cells[row][column][0]) | bits), color)
    return cells


def _canvas() -> Any:  # Any: plotille's class, which need not be installed
    try:
        from plotille import Canvas
    except ImportError as error:
        raise MissingDependency("plotille", needed_for="`loopwright watch`", extra="report") from error
    return Canvas
