"""Metrics beside a bar, or on lines below it: the bar itself, step and speed come first."""

from __future__ import annotations

MIN_BAR = 10  # columns
_MOST_LINES = 3
_MORE = "…"


def fold(parts: list[str], delimiter: str, columns: int) -> list[str]:
    """Return the metrics as lines of whole metrics; at most three, with "…" for the rest.

    Args:
        parts: A text for each metric; one that is longer than a line is cut.
        delimiter: Between two of them.
        columns: Width of a line.
    """
    lines: list[str] = []
    for part in parts:
        text = part if len(part) <= columns else part[: max(0, columns - 1)] + _MORE
        if lines and len(lines[-1]) + len(delimiter) + len(text) <= columns:
            lines[-1] += delimiter + text
        elif len(lines) == _MOST_LINES:
            last = lines[-1] + delimiter + _MORE
            lines[-1] = last if len(last) <= columns else lines[-1][: max(0, columns - 1)] + _MORE
            break
        else:
            lines.append(text)
    return lines
