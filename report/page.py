"""`write_report`: runs as one self-contained HTML page, with the library that draws; it fetches nothing.

Tables are HTML, made here, and can be read without scripts. Curves are data in the page, drawn by page.js with Plotly.
"""

from __future__ import annotations

import base64
import colorsys
import datetime
import functools
import html
import json
import math
import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path

from ..errors import ConfigError, MissingDependency
from ..files import replace_file
from ..messages import counted
from ..protocols import Tree
from .charts import GRADIENTS, METRICS, MOST_TOGETHER, Chart, extremes, make_charts, not_finite, thin, with_speed
from .names import natural, short_names
from .page_media import render_media
from .runs import LoggedRun

# Okabe and Ito's palette, which color-blind readers can distinguish; yellow is too light for lines.
_LEAST_PART = 0.01  # of a fit's time, to be seen in a bar
_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f6ae0", "#8c8c8c")
_NONE = "&ndash;"


def _colors(count: int) -> list[str]:
    """Return one color per run, or the palette where that is enough: further ones turn by the golden angle."""
    more = range(max(0, count - len(_COLORS)))
    turned = [colorsys.hls_to_rgb((0.07 + 0.618034 * number) % 1, 0.45, 0.65) for number in more]
    return [*_COLORS, *("#" + "".join(f"{round(255 * part):02x}" for part in color) for color in turned)]


_MOST_MARKS = 40  # checkpoints drawn as lines
_MOST_OPEN = 30  # charts in groups that are open at first
# The page may not request anything from any address.
_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
_UNITS = (
    ("\u00b5s", 1e-6, 1e-3),
    ("ms", 1e-3, 0.1),
    ("s", 1.0, 180.0),
    ("min", 60.0, 10800.0),
    ("h", 3600.0, 259200.0),
    ("days", 86400.0, math.inf),
)


def write_report(
    runs: Sequence[LoggedRun], path: str | os.PathLike[str], *, title: str | None = None, smoothing: float = 0.6
) -> Path:
    """Write the page of some runs; a reader sees the old file or the new one.

    Args:
        runs: From `read_runs`.
        path: The HTML file.
        title: The page's heading; None takes the names of the runs.
        smoothing: Where the slider stands when the page opens: 0 draws what was logged, 0.99 almost a line.

    Returns:
        The path.

    Raises:
        ConfigError: The smoothing is out of range, or the path is a directory or its directory does not exist.
        MissingDependency: Plotly is not installed.
    """
    target = Path(path)
    if target.is_dir() or not target.absolute().parent.is_dir():
        problem = "is a directory" if target.is_dir() else "is in a directory that does not exist"
        raise ConfigError(f"{str(path)!r} {problem}.", fix="pass the path of the HTML file that is to be written.")
    replace_file(target, render_page(runs, title=title, smoothing=smoothing))
    return target


def _title(names: Sequence[str]) -> str:
    """Return the common folder of all runs and their number; the names of a few runs without a common folder."""
    short = short_names(names)
    common = names[0][: len(names[0]) - len(short[0])].rstrip("/")
    if common:
        return f"{common}: {len(names)} runs"
    return ", ".join(short[:4]) + (f" and {len(short) - 4} more" if len(short) > 4 else "")


def _has_metrics(run: LoggedRun) -> bool:
    return bool(run.series or run.media or any((folder / "media").is_dir() for folder in run.folders))


def render_page(runs: Sequence[LoggedRun], *, title: str | None = None, smoothing: float = 0.6) -> str:
    """Return the page's text; arguments as in `write_report`."""
    if not 0 <= smoothing < 1:
        raise ConfigError(f"smoothing={smoothing!r}; expected a number from 0 to below 1.", fix="pass smoothing=0.6.")
    if not runs:
        raise ConfigError("There are no runs to report.", fix="pass what read_runs() returned.")
    library = _packed_plotly()
    for run in runs:
        with_speed(run)
    with_metrics = [run.name for run in runs if _has_metrics(run)]
    shown_title = title or _title(with_metrics or [run.name for run in runs])
    every = [replace(run, name=name) for run, name in zip(runs, short_names([run.name for run in runs]), strict=True)]
    # Runs that failed before their first metric would fill legends and tables; they are listed, folded.
    bare = [run for run in every if with_metrics and not _has_metrics(run)]
    runs = [run for run in every if run not in bare]
    charts = make_charts(runs)
    here = Path(__file__).parent
    body = [
        _header(runs, bare, shown_title),
        _controls(runs, smoothing),
        "<main>",
        _problems(every),
        _chart_sections(charts),
        render_media(runs, [_key(number, runs) for number in range(len(runs))]),
        _timeline(runs),
        _numbers(runs, charts),
        _checkpoints(runs),
        _compared("Configuration", "configuration", [run.config for run in runs], runs),
        _compared("Environment", "environment", [run.environment for run in runs], runs),
        "</main>",
    ]
    page = "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">',
            f"<title>{html.escape(shown_title)}</title>",
            f"<style>{(here / 'page.css').read_text(encoding='utf-8')}</style></head><body>",
            *(part for part in body if part),
            f'<script type="application/json" id="data">{_json(_data(runs, charts))}</script>',
            f'<script type="text/plain" id="plotly" data-size="{library[1]}">{library[0]}</script>',
            f"<script>{(here / 'page.js').read_text(encoding='utf-8')}</script>",
            "</body></html>\n",
        ]
    )
    # Names may have what UTF-8 cannot write: bytes of a folder's name, a half of a pair in JSON.
    return page.encode("utf-8", "backslashreplace").decode()


def _packed_plotly() -> tuple[str, int]:
    """Return the library that draws, compressed to two fifths of its size, and its bytes: page.js unpacks it."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise MissingDependency("plotly", needed_for="`loopwright report`", extra="report") from error
    return _packed(str(get_plotlyjs()))


@functools.lru_cache(maxsize=1)
def _packed(library: str) -> tuple[str, int]:
    """Return a text compressed, in base 85, and the number of compressed bytes.

    Base 85 needs a sixth less room than base 64. Its "<" would be read as HTML, so a comma stands for it.
    """
    packed = zlib.compress(library.encode(), 9)
    return base64.b85encode(packed, pad=True).decode().replace("<", ","), len(packed)


# --- what the script draws ------------------------------------------------------------------------------------------


def _data(runs: Sequence[LoggedRun], charts: Sequence[Chart]) -> dict[str, object]:  # what JSON holds
    drawn = []
    names = short_names([run.name for run in runs])
    most = _points_of(sum(len(run.series) for run in runs))
    for chart in charts:
        curves = []
        for number, run in enumerate(runs):
            for name in chart.names:
                if name in run.series:
                    curve = thin(run.series[name], most)
                    band = {"low": curve.low, "high": curve.high} if curve.is_thinned else {}
                    curves.append({"run": number, "name": name, "steps": curve.steps, "values": curve.values, **band})
        drawn.append({"smooth": chart.heading in (METRICS, GRADIENTS), "names": chart.names, "curves": curves})
    bars = _bars(runs)
    unit, seconds, _ = _unit(max((run.seconds or 0.0 for run in runs), default=0.0))
    return {
        "colors": _colors(len(runs)),
        "time": {"scale": 1 / seconds, "title": f"training time, {unit}"},
        "charts": drawn,
        "runs": [
            {
                "name": names[number],
                "axes": {name: _thin_axis(axis) for name, axis in run.axes.items()},
                "checkpoints": sorted({f.step for f in run.checkpoints if f.step is not None})[-_MOST_MARKS:],
                "phases": [(name, part) for name, part in bars[number].items() if part],
            }
            for number, run in enumerate(runs)
        ],
    }


def _points_of(num_curves: int) -> int:
    """Return the maximum number of points of a curve: fewer if there are hundreds of curves, to keep the page small."""
    return max(40, min(1000, 60_000 // max(num_curves, 1)))


def _thin_axis(axis: tuple[list[int], list[float]], most: int = 2000) -> tuple[list[int], list[float]]:
    steps, values = axis
    stride = math.ceil(len(steps) / most)
    chosen = [*range(0, len(steps) - 1, stride), len(steps) - 1]
    return [steps[index] for index in chosen], [values[index] for index in chosen]


def _bars(runs: Sequence[LoggedRun]) -> list[dict[str, float]]:
    """Return the parts of each run's time, in the order of a step; small ones together, so that each has a color."""
    fractions = [dict(_fractions(run.timeline)) for run in runs]
    names = dict.fromkeys(name for found in fractions for name in found)
    largest = {name: max(found.get(name, 0.0) for found in fractions) for name in names}
    small = sorted(names, key=lambda name: largest[name], reverse=True)[len(_COLORS) - 1 :]
    small = [name for name in names if name in small or largest[name] < _LEAST_PART]
    if len(small) < 2:
        return fractions
    bars = [{name: found.get(name, 0.0) for name in names if name not in small} for found in fractions]
    for bar, found in zip(bars, fractions, strict=True):
        bar["other"] = sum(found.get(name, 0.0) for name in small)
    return bars


def _fractions(timeline: Mapping[str, float]) -> list[tuple[str, float]]:
    total = sum(timeline.values())
    return [(name, seconds / total) for name, seconds in timeline.items()] if total > 0 else []


def _json(value: Tree) -> str:
    # Nothing in it may end the script element that it stands in.
    text = json.dumps(value, allow_nan=False, separators=(",", ":"), ensure_ascii=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


# --- what can be read without scripts -------------------------------------------------------------------------------


def _header(runs: Sequence[LoggedRun], bare: Sequence[LoggedRun], title: str) -> str:
    now = datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z")
    rows = []
    for number, run in enumerate(runs):
        steps = max([run.last_step + 1, *(file.step or 0 for file in run.checkpoints)])
        rows.append(
            [
                _key(number, runs) + html.escape(run.name),
                f"{steps:,}" if steps else _NONE,
                _NONE if run.seconds is None else duration(run.seconds),
                str(len(run.checkpoints) or _NONE),
                html.escape(", ".join(dict.fromkeys(run.kinds))),
                _folders(run),
            ]
        )
    table = _table(["run", "steps", "training time", "checkpoints", "read from", "folders"], rows, numbers=(1, 2, 3))
    made = f'<div class="dim">Loopwright report, made {now}</div>'
    return f"<header><h1>{html.escape(title)}</h1>{made}{table}{_without_metrics(bare)}</header>"


def _without_metrics(runs: Sequence[LoggedRun]) -> str:
    if not runs:
        return ""
    rows = [[html.escape(run.name), str(len(run.checkpoints) or _NONE), _folders(run)] for run in runs]
    table = _table(["run", "checkpoints", "folders"], rows, numbers=(1,))
    return f'<details id="bare"><summary>{counted(len(runs), "run")} without metrics</summary>{table}</details>'


def _folders(run: LoggedRun) -> str:
    return "<br>".join(f"<code>{html.escape(str(place))}</code>" for place in run.places or run.folders)


def _controls(runs: Sequence[LoggedRun], smoothing: float) -> str:
    axes = ["step", *(axis for axis in ("time", "epoch", "samples", "tokens") if any(axis in r.axes for r in runs))]
    options = "".join(f'<option value="{axis}">{axis}</option>' for axis in axes)
    parts = [
        f'<label>Smoothing <input id="smoothing" type="range" min="0" max="0.99" step="0.01" value="{smoothing:.2f}">'
        f'<output id="smoothed">{smoothing:.2f}</output></label>',
        f'<label>Horizontal axis <select id="axis">{options}</select></label>',
        '<label><input id="log" type="checkbox"> logarithmic</label>',
        '<label>Metrics <input id="filter" type="search" placeholder="all: loss, acc|f1, ..." autocomplete="off">'
        '<output id="shown"></output></label>',
    ]
    if any(run.checkpoints for run in runs):
        parts.append('<label><input id="marks" type="checkbox" checked> checkpoints</label>')
    names = short_names([run.name for run in runs])
    boxes = [
        f'<label title="{html.escape(run.name)}"><input type="checkbox" checked data-run="{number}">'
        f"{_key(number, runs)}{html.escape(names[number])}</label>"
        for number, run in enumerate(runs)
    ]
    if len(runs) > 1:
        every = '<label><input type="checkbox" checked id="every"> all runs</label>' if len(runs) > 3 else ""
        parts.append(f'<div id="runs">{every}{"".join(boxes)}</div>')
    note = '<noscript class="warn">The curves are drawn by a script, which this browser does not run.</noscript>'
    return f'<div id="controls">{"".join(parts)}{note}</div>'


def _problems(runs: Sequence[LoggedRun]) -> str:
    lines = [f"{run.name}: {problem}" for run in runs for problem in run.problems]
    for run in runs:
        for series in run.series.values():
            steps = not_finite(series)
            if steps:
                more = f", … ({len(steps)} in all)" if len(steps) > 5 else ""
                lines.append(f"{run.name}: {series.name} is not finite at step {', '.join(map(str, steps[:5]))}{more}")
    items = "".join(f"<li>{html.escape(line)}</li>" for line in lines)
    return f'<h2>To look at</h2><ul class="warn" id="problems">{items}</ul>' if lines else ""


def _chart_sections(charts: Sequence[Chart]) -> str:
    sections: list[str] = []
    drawn = 0
    for heading, group in groupby(enumerate(charts), key=lambda item: item[1].group):
        cards = [_card(number, chart) for number, chart in group]
        width = "many" if len(cards) > 1 else "one"  # headings with one chart stand beside each other
        # The first group and small ones are open; a closed one draws nothing until it is opened.
        is_few = len(cards) <= MOST_TOGETHER and drawn + len(cards) <= _MOST_OPEN
        is_open = " open" if not sections or is_few else ""
        drawn += len(cards)
        count = f' <span class="dim">{len(cards)}</span>' if len(cards) > 1 else ""
        sections.append(
            f'<details class="{width}"{is_open}><summary><h2>{html.escape(heading)}{count}</h2></summary>'
            f'<div class="grid">{"".join(cards)}</div></details>'
        )
    return f'<div id="charts">{"".join(sections)}</div>'


def _card(number: int, chart: Chart) -> str:
    names = html.escape("\n".join(chart.names))  # what the filter looks at; shown when the mouse is on the title
    title = html.escape(chart.title)
    return (
        f'<div class="chart" data-names="{names}"><h3 title="{names}">{title}</h3>'
        f'<div class="plot" id="chart-{number}"></div></div>'
    )


def _timeline(runs: Sequence[LoggedRun]) -> str:
    if not any(run.timeline for run in runs):
        return ""
    total = {name: 0.0 for run in runs for name in run.timeline}
    for run in runs:
        for name, fraction in _fractions(run.timeline):
            total[name] += fraction
    rows = []
    for name in sorted(total, key=lambda name: -total[name]):
        cells = []
        for run in runs:
            fraction_of = dict(_fractions(run.timeline)).get(name)
            cells.append(_NONE if fraction_of is None else f"{duration(run.timeline[name])}, {fraction_of:.1%}")
        rows.append([html.escape(name), *cells])
    table = _table(["phase", *(html.escape(run.name) for run in runs)], rows, numbers=range(1, len(runs) + 1))
    about: dict[str, list[str]] = {}  # what several runs have in common is said once
    for number, run in enumerate(runs):
        for note in run.timeline_notes:
            name = f"<span>{_key(number, runs)}{html.escape(run.name)}</span>" if len(runs) > 1 else ""
            about.setdefault(note, []).append(name)
    notes = "".join(
        f'<li>{html.escape(note)} <span class="dim">{" ".join(names)}</span></li>' for note, names in about.items()
    )
    return (
        f'<h2>Where the time went</h2><div class="chart"><div class="plot bars" id="timeline"></div></div>'
        f'<div id="phases">{table}<ul>{notes}</ul></div>'
    )


def _numbers(runs: Sequence[LoggedRun], charts: Sequence[Chart]) -> str:
    rows = []
    for name in (name for chart in charts for name in chart.names):
        for number, run in enumerate(runs):
            found = extremes(run.series[name]) if name in run.series else None
            if found is None:
                continue
            first = [f"<code>{html.escape(name)}</code>"]
            if len(runs) > 1:
                first.append(_key(number, runs) + html.escape(run.name))
            cells = [f"{value:.6g} <span class=dim>at {step:,}</span>" for value, step in found]
            rows.append([*first, *cells])
    head = ["metric", *(["run"] if len(runs) > 1 else []), "last", "smallest", "largest"]
    width = len(head)
    table = _table(head, rows, numbers=range(width - 3, width))
    is_open = " open" if len(rows) <= 100 else ""
    return f'<details id="numbers"{is_open}><summary><h2>Numbers</h2></summary>{table}</details>'


def _checkpoints(runs: Sequence[LoggedRun]) -> str:
    rows = []
    for number, run in enumerate(runs):
        for file in run.checkpoints:
            shown = _below(file.path, run.folders)
            score = "" if file.score is None else f"{file.monitor or 'score'} {file.score:.6g}"
            note = f' <span class="warn">cannot be read: {html.escape(file.problem)}</span>' if file.problem else ""
            modified = datetime.datetime.fromtimestamp(file.modified).strftime("%Y-%m-%d %H:%M:%S")
            rows.append(
                [
                    *([_key(number, runs) + html.escape(run.name)] if len(runs) > 1 else []),
                    f"<code>{html.escape(shown)}</code>{note}",
                    _NONE if file.step is None else f"{file.step:,}",
                    html.escape(", ".join(file.roles)),
                    html.escape(score),
                    f"{file.size_bytes / 1e6:,.1f} MB",
                    modified,
                ]
            )
    if not rows:
        return ""
    head = [*(["run"] if len(runs) > 1 else []), "file", "step", "is", "score", "size", "written"]
    begin = len(head) - 6
    table = _table(head, rows, numbers=(begin + 1, begin + 4))
    return f'<h2>Checkpoints kept</h2><div id="checkpoints">{table}</div>'


def _compared(heading: str, name: str, columns: Sequence[Mapping[str, str]], runs: Sequence[LoggedRun]) -> str:
    """Return a table of names and each run's value; rows in which runs differ are marked."""
    names = sorted({name for column in columns for name in column}, key=natural)
    if not names:
        return ""
    rows, marked = [], []
    for row, key in enumerate(names):
        values = [column.get(key) for column in columns]
        if len(set(values)) > 1:
            marked.append(row)
        rows.append([f"<code>{html.escape(key)}</code>", *(_NONE if v is None else html.escape(v) for v in values)])
    head = ["name", *(html.escape(run.name) for run in runs)] if len(runs) > 1 else ["name", "value"]
    return f'<h2>{heading}</h2><div id="{name}">{_table(head, rows, marked=marked)}</div>'


def _table(
    head: Iterable[str], rows: Iterable[Sequence[str]], *, numbers: Iterable[int] = (), marked: Iterable[int] = ()
) -> str:
    """Return a table without its empty columns; heads and cells are HTML already."""
    right, differing = set(numbers), set(marked)
    lines = []
    head, rows = list(head), list(rows)
    filled = [column for column in range(len(head)) if any(row[column] not in ("", _NONE) for row in rows)]
    head = [head[column] for column in filled]
    for number, row in enumerate(rows):
        cells = "".join(
            f'<td class="number">{row[column]}</td>' if column in right else f"<td>{row[column]}</td>"
            for column in filled
        )
        lines.append(f'<tr class="differs">{cells}</tr>' if number in differing else f"<tr>{cells}</tr>")
    heads = "".join(f"<th>{name}</th>" for name in head)
    return f'<div class="wide"><table><thead><tr>{heads}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'


def _key(number: int, runs: Sequence[LoggedRun]) -> str:
    if len(runs) == 1:
        return ""
    return f'<span class="key" style="background:{_colors(len(runs))[number]}"></span>'


def _below(path: Path, folders: Sequence[Path]) -> str:
    """Return a path relative to the folder that it has in common with a run's folders."""
    try:
        common = os.path.commonpath([path.absolute().parent, *(folder.absolute() for folder in folders)])
    except ValueError:
        return str(path)  # on another drive
    return path.absolute().relative_to(common).as_posix()


def _unit(seconds: float) -> tuple[str, float, float]:
    return next(unit for unit in _UNITS if seconds < unit[2])


def duration(seconds: float | None) -> str:
    """Return seconds in a suitable unit; a dash if unknown."""
    if seconds is None:
        return "-"
    unit, scale, _ = _unit(seconds)
    return f"{seconds / scale:.3g} {unit}"
