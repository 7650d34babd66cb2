"""Which metrics share a chart, and under which heading; long curves as shorter ones.

`train_loss` and `val_loss` share one chart, as do `loss_step` and `loss_epoch`, and all learning rates.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from .names import natural
from .runs import LoggedRun, Series

METRICS, RATES, SPEED, GRADIENTS, MACHINE = (
    "Metrics", "Learning rate and schedules", "Throughput", "Gradients and weights", "Machine",
)  # fmt: skip
_HEADINGS = (
    (RATES, re.compile(r"^(lr|learning_rate|momentum|weight_decay)([/_-]|$)|-(lr|momentum|weight_decay)$")),
    (
        SPEED,
        re.compile(r"per_sec|per_s$|/s$|throughput|mfu|flops|steps_per|samples_per|tokens_per|step_time|efficiency"),
    ),
    (GRADIENTS, re.compile(r"grad|weights?[/_.]|_norm|norm/|update_ratio|histogram")),
    (
        MACHINE,
        re.compile(
            r"memory|gpu|cuda|cpu|(^|[/_])(ram|vram)|swap|disk|utili[sz]|temperature|power|alloc|reserved|network"
        ),
    ),
)
_ORDER = (METRICS, RATES, SPEED, GRADIENTS, MACHINE)
_BEFORE = re.compile(r"^(train|training|val|valid|validation|eval|test)[/_.-](?=.)")
_AFTER = re.compile(r"(?<=.)[/_.-](train|val|valid|validation|eval|test)$")
_TEST = re.compile(r"^test[/_.-]|[/_.-]test$")
_LEVEL = re.compile(r"(?<=.)_(step|epoch)$")
_LOADER = re.compile(r"/dataloader_idx_\d+$")
_MOST_POINTS = 1000
MOST_TOGETHER = 12  # more charts under one heading are grouped by their prefixes
_DERIVED = "steps_per_sec"


@dataclass(frozen=True)
class Curve:
    """A series as it is drawn.

    Attributes:
        steps: Ascending.
        values: One per step, the mean where several were joined; None where it is not finite.
        low: Smallest of those joined; empty if none were.
        high: Largest of those joined.
    """

    steps: list[int]
    values: list[float | None]
    low: list[float | None] = field(default_factory=list)
    high: list[float | None] = field(default_factory=list)

    @property
    def is_thinned(self) -> bool:
        """Whether points were joined."""
        return bool(self.low)


@dataclass
class Chart:
    """Metrics that share a chart.

    Attributes:
        title: What they have in common.
        heading: Its heading.
        names: The metrics.
        group: The collapsible group that it belongs to: its heading, or a prefix that several charts of a large heading
            share.
    """

    title: str
    heading: str
    names: list[str]
    group: str = ""

    def __post_init__(self) -> None:
        """Use the heading as the group if none is given."""
        self.group = self.group or self.heading


def make_charts(runs: Iterable[LoggedRun]) -> list[Chart]:
    """Return the charts of all metrics of some runs, in the order in which they are shown."""
    charts: dict[tuple[int, str], Chart] = {}
    for name in sorted({name for run in runs for name in run.series}, key=natural):
        heading = next((heading for heading, pattern in _HEADINGS if pattern.search(name.lower())), METRICS)
        title = base_of(name)
        if heading == RATES:
            title = re.split(r"[/_-]", title)[0] if title.startswith(("lr", "momentum")) else title
            title = {"lr": "learning rate"}.get(title, title)
            if title == "learning rate":  # lr-Adam/pg1-momentum is not a rate
                title = next((word for word in ("momentum", "weight_decay") if name.endswith(f"-{word}")), title)
        chart = charts.setdefault((_ORDER.index(heading), title), Chart(title, heading, []))
        chart.names.append(name)
    for chart in charts.values():  # training, validation, then tests
        chart.names.sort(key=lambda name: bool(_TEST.search(name)))
    # The loss first: it is what people look at.
    ordered = sorted(charts, key=lambda key: (key[0], "loss" not in key[1].split("/")[-1], natural(key[1])))
    return _grouped([charts[key] for key in ordered])


def _grouped(charts: list[Chart]) -> list[Chart]:
    """Group the charts of a heading by the first part of their names, if they fill more than a screen."""
    grouped: list[Chart] = []
    for heading in _ORDER:
        here = [chart for chart in charts if chart.heading == heading]
        if len(here) <= MOST_TOGETHER:
            grouped += here
            continue
        prefixes = [chart.title.split("/")[0] if "/" in chart.title else "" for chart in here]
        groups = {prefix: prefixes.count(prefix) for prefix in prefixes if prefix}
        for chart, prefix in zip(here, prefixes, strict=True):
            if groups.get(prefix, 0) > 1:
                chart.group, chart.title = f"{heading}: {prefix}", chart.title.removeprefix(f"{prefix}/")
        first = {chart.group: number for number, chart in reversed(list(enumerate(here)))}
        grouped += sorted(here, key=lambda chart: (chart.group != heading, first[chart.group]))
    return grouped


def base_of(name: str) -> str:
    """Return a metric's name without the parts for training, validation, steps and epochs."""
    for pattern in (_LOADER, _LEVEL, _BEFORE, _AFTER):
        name = pattern.sub("", name)
    return name


def thin(series: Series, most: int = _MOST_POINTS) -> Curve:
    """Return a curve of at most `most` points: neighbors become their mean, minimum and maximum."""
    count = len(series.steps)
    if count <= most:
        return Curve(list(series.steps), [_finite(value) for value in series.values])
    curve = Curve([], [])
    for number in range(most):
        begin, end = number * count // most, (number + 1) * count // most
        finite = [value for value in series.values[begin:end] if math.isfinite(value)]
        curve.steps.append(series.steps[(begin + end) // 2])
        mean = math.fsum(value / len(finite) for value in finite) if finite else math.nan
        curve.values.append(_short(mean))
        curve.low.append(_short(min(finite, default=math.nan)))
        curve.high.append(_short(max(finite, default=math.nan)))
    return curve


def with_speed(run: LoggedRun) -> None:
    """Add steps per second, from the times of the log, to a run that has logged no throughput."""
    if "time" not in run.axes or any(_HEADINGS[1][1].search(name.lower()) for name in run.series):
        return
    steps, seconds = run.axes["time"]
    speed = Series(_DERIVED, [], [])
    last_step, last_seconds = steps[0], seconds[0]
    # Half a second at least: two loggers write a step at almost the same time.
    least = max(0.5, (seconds[-1] - seconds[0]) / _MOST_POINTS)
    for step, at in zip(steps, seconds, strict=True):
        if at - last_seconds >= least and step > last_step:
            speed.steps.append(step)
            speed.values.append((step - last_step) / (at - last_seconds))
            last_step, last_seconds = step, at
    if len(speed.steps) > 1:
        run.series[_DERIVED] = speed


def extremes(series: Series) -> tuple[tuple[float, int], tuple[float, int], tuple[float, int]] | None:
    """Return last, smallest and largest finite value, each with its step; None if no value is finite."""
    pairs = [(value, step) for step, value in zip(series.steps, series.values, strict=True) if math.isfinite(value)]
    return (pairs[-1], min(pairs), max(pairs)) if pairs else None


def not_finite(series: Series) -> list[int]:
    """Return the steps where the value is NaN or infinite."""
    return [step for step, value in zip(series.steps, series.values, strict=True) if not math.isfinite(value)]


def smoothed(values: Sequence[float], weight: float) -> list[float]:
    """Return the exponential moving average of finite values, without the bias toward zero at its start."""
    average, total, result = 0.0, 0.0, []
    for value in values:
        average = weight * average + (1 - weight) * value
        total = weight * total + (1 - weight)
        result.append(average / total)
    return result


def _short(value: float) -> float | None:
    """Return a number of a shortened curve with the digits that can be seen: they are most of a large page."""
    return float(f"{value:.7g}") if math.isfinite(value) else None


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
