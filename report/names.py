"""Names for readers: in natural order, and without their common prefix."""

from __future__ import annotations

import re
from collections.abc import Sequence

_NUMBER = re.compile(r"(\d+)")


def natural(name: str) -> list[tuple[int, int, str]]:
    """Return the key that sorts layer2 before layer10, and without regard to case."""
    parts = _NUMBER.split(name)
    key = [(1, int(part), "") if part.isdecimal() else (0, 0, part.lower()) for part in parts if part]
    return [*key, (-1, 0, name)]  # names that differ in case alone keep one order


def short_names(names: Sequence[str]) -> list[str]:
    """Return names without their common leading folders; a single name as it is."""
    if len(set(names)) < 2:
        return list(names)
    parts = [name.split("/") for name in names]
    common = 0
    while all(len(part) > common + 1 for part in parts) and len({part[common] for part in parts}) == 1:
        common += 1
    return ["/".join(part[common:]) for part in parts]
