"""The section of a report with logged images, texts and histograms; it needs no script."""

from __future__ import annotations

import base64
import html
import math
from collections.abc import Sequence

from .media import HISTOGRAM, IMAGE, TEXT, Bin, Media, chosen, kind_of_image, read_media_folder
from .runs import LoggedRun

_MOST_BYTES = 8_000_000  # of pictures in one page
_HEADINGS = {IMAGE: "Images", TEXT: "Texts", HISTOGRAM: "Histograms"}
_WIDTH, _HEIGHT, _SHIFT = 320.0, 60.0, 16.0
_MARGIN, _STEPS = 20.0, 50.0  # beside the lines: half a number of the axis, the numbers of the steps


def render_media(runs: Sequence[LoggedRun], keys: Sequence[str]) -> str:
    """Return the section; nothing if no run has logged any.

    Args:
        runs: The runs.
        keys: HTML of each run's color, in front of its name.
    """
    cards: dict[tuple[str, str], list[str]] = {}
    left = _MOST_BYTES
    for run, key in zip(runs, keys, strict=True):
        files = [item for folder in run.folders for item in read_media_folder(folder)]
        for (kind, name), items in chosen([*files, *run.media]).items():
            shown = []
            for item in items if kind != HISTOGRAM else ():
                left -= len(item.content) if kind == IMAGE else 0
                shown.append(_picture(item) if kind == IMAGE and left >= 0 else _text(item) if kind == TEXT else "")
            body = _ridges(items) if kind == HISTOGRAM else "".join(shown)
            if body:
                run_name = f'<div class="dim">{key}{html.escape(run.name)}</div>' if len(runs) > 1 else ""
                cards.setdefault((kind, name), []).append(f'{run_name}<div class="media">{body}</div>')
    sections = []
    for kind, heading in _HEADINGS.items():
        named = [(name, parts) for (one, name), parts in cards.items() if one == kind]
        if named:
            inside = "".join(_card(html.escape(name), parts) for name, parts in named)
            count = f' <span class="dim">{len(named)}</span>'
            sections.append(
                f'<details class="many" open><summary><h2>{heading}{count}</h2></summary>'
                f'<div class="grid">{inside}</div></details>'
            )
    if not sections:
        return ""
    note = '<p class="dim">Not all pictures fit into the page.</p>' if left < 0 else ""
    return f'<div id="media">{"".join(sections)}{note}</div>'


def _card(name: str, parts: Sequence[str]) -> str:
    return f'<div class="chart" data-names="{name}"><h3>{name}</h3>{"".join(parts)}</div>'


def _picture(item: Media) -> str:
    assert isinstance(item.content, bytes)
    kind = kind_of_image(item.content)
    if kind is None:
        return ""
    caption = f": {html.escape(item.caption)}" if item.caption else ""
    data = base64.b64encode(item.content).decode()
    image = f'<img alt="" src="data:{kind};base64,{data}">'
    return f"<figure>{image}<figcaption>step {item.step:,}{caption}</figcaption></figure>"


def _text(item: Media) -> str:
    return f"<figure><pre>{html.escape(str(item.content))}</pre><figcaption>step {item.step:,}</figcaption></figure>"


def _ridges(items: Sequence[Media]) -> str:
    """Return histograms as lines one above the other, the newest in front, over an axis of the values."""
    bins: list[tuple[int, tuple[Bin, ...]]] = [
        (item.step, item.content) for item in items if isinstance(item.content, tuple) and item.content
    ]
    if not bins:
        return ""
    low = min(one[0] for _, content in bins for one in content)
    high = max(one[1] for _, content in bins for one in content)
    span = (high - low) or 1.0
    bottom = _HEIGHT + _SHIFT * (len(bins) - 1)
    ticks = _ticks(low, high)
    drawn = [f'<path class="grid-line" d="M{_x(tick, low, span)},0V{bottom:.0f}"/>' for tick in ticks]
    for number, (step, content) in enumerate(bins):
        base = _HEIGHT + _SHIFT * number
        # A bin's height is its density: bins differ in width.
        densities = [count / max(upper - lower, span / 1000) for lower, upper, count in content]
        top = max(densities)
        points = [f"{_x(content[0][0], low, span)},{base:.1f}"]
        for (lower, upper, _), density in zip(content, densities, strict=True):
            y = base - (_HEIGHT - 4) * density / top
            points += [f"{_x(lower, low, span)},{y:.1f}", f"{_x(upper, low, span)},{y:.1f}"]
        points.append(f"{_x(content[-1][1], low, span)},{base:.1f}")
        drawn.append(f'<polyline points="{" ".join(points)}"><title>step {step:,}</title></polyline>')
        drawn.append(f'<text x="{_WIDTH + _MARGIN + 6:.0f}" y="{base:.1f}">{step:,}</text>')
    drawn += [f'<text class="tick" x="{_x(tick, low, span)}" y="{bottom + 14:.0f}">{tick:.4g}</text>' for tick in ticks]
    drawn.append(f'<path class="axis" d="M{_MARGIN:.0f},{bottom:.0f}H{_MARGIN + _WIDTH:.0f}"/>')
    drawn.append(f'<text x="{_WIDTH + _MARGIN + 6:.0f}" y="{_HEIGHT - 16:.0f}">step</text>')
    return (
        f'<figure class="ridges"><svg viewBox="0 0 {_MARGIN + _WIDTH + _STEPS:.0f} {bottom + 20:.0f}" role="img">'
        f"{''.join(drawn)}</svg><figcaption>{low:.4g} to {high:.4g}; each step scaled to its highest bin</figcaption>"
        "</figure>"
    )


def _ticks(low: float, high: float) -> list[float]:
    """Return at most five round numbers within a range; its only value if it has one."""
    span = high - low
    if not 0 < span < math.inf:
        return [low]
    unit = 10.0 ** math.floor(math.log10(span / 4))
    size = unit * next(factor for factor in (1.0, 2.0, 2.5, 5.0, 10.0) if unit * factor >= span / 4 * (1 - 1e-9))
    return [number * size for number in range(math.ceil(low / size), math.floor(high / size) + 1)]


def _x(value: float, low: float, span: float) -> str:
    return f"{_MARGIN + _WIDTH * (value - low) / span:.1f}"
