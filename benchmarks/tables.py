"""Tables of RESULTS.md."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["table"]


def table(header: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """Return a Markdown table; the first column is text, the others are numbers."""
    names = list(header)
    lines = [names, ["---"] + ["---:"] * (len(names) - 1), *[[str(cell) for cell in row] for row in rows]]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
