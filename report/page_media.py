"""The section of a report with logged images, texts and histograms; it needs no script."""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence

from .media import HISTOGRAM, IMAGE, TEXT, Bin, Media, chosen, kind_of_image, read_media_folder
from .runs import LoggedRun

_MOST_BYTES = 8_000_000  # of pictures in one page
_HEADINGS = {IMAGE: "Images", TEXT: "Texts", HISTOGRAM: "Histograms"}
_WIDTH, _HEIGHT, _SHIFT = 300.0, 60.0, 16.0


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
    """Return histograms as lines one above the other, the newest in front."""
    bins: list[tuple[int, tuple[Bin, ...]]] = [
        (item.step, item.content) for item in items if isinstance(item.content, tuple) and item.content
    ]
    if not bins:
        return ""
    low = min(one[0] for _, content in bins for one in content)
    high = max(one[1] for _, content in bins for one in content)
    span = (high - low) or 1.0
    height = _HEIGHT + _SHIFT * (len(bins) - 1)
    lines = []
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
        lines.append(f'<polyline points="{" ".join(points)}"><title>step {step:,}</title></polyline>')
    steps = f"step {bins[0][0]:,}" + (f" (back) to {bins[-1][0]:,} (front)" if len(bins) > 1 else "")
    return (
        f'<figure><svg class="ridges" viewBox="0 0 {_WIDTH:.0f} {height + 2:.0f}" role="img">{"".join(lines)}</svg>'
        f"<figcaption>{low:.4g} to {high:.4g}; {steps}</figcaption></figure>"
    )


def _x(value: float, low: float, span: float) -> str:
    return f"{_WIDTH * (value - low) / span:.1f}"
