"""docs/strategies.md names every strategy that there is."""

from __future__ import annotations

import re
from pathlib import Path

from loopwright.strategies import STRATEGY_REGISTRY

PAGE = Path(__file__).resolve().parents[3] / "docs" / "strategies.md"


def test_the_table_has_every_registered_name_and_no_other() -> None:
    table = PAGE.read_text(encoding="utf-8").split("## All strategies")[1].split("\n## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("| `")]
    named = {name for line in rows for name in re.findall(r"`([a-z_0-9]+)`", line.split("|")[1])}
    # Of "ddp" there are variants with one ending, which the page names once.
    registered = {name for name in STRATEGY_REGISTRY.names() if "_find_unused_parameters_" not in name}
    assert named == registered
