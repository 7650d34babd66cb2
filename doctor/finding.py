"""`Finding`: one result of `loopwright doctor`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Level(Enum):
    """Severity of a finding."""

    OK = "ok"
    """As it should be, or a plain fact."""
    NOTE = "note"
    """An optional part is missing."""
    WARNING = "warning"
    """Training works, but something will be slow or fail under load."""
    PROBLEM = "problem"
    """A requested or required part does not work."""


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        section: The heading that it stands under.
        name: What was examined.
        value: What was found, in one line.
        level: How much it matters.
        advice: What to do about it; empty where nothing is to be done.
    """

    section: str
    name: str
    value: str
    level: Level = Level.OK
    advice: str = ""


def show_size(size_bytes: float) -> str:
    """Return a human-readable number of bytes, in powers of 1024."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size_bytes < 1024:
            return f"{size_bytes:.0f} {unit}" if unit == "B" or size_bytes >= 100 else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.1f} TiB"
