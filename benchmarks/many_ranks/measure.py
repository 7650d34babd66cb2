"""How what a rank does grows with the number of ranks, by simulation: 8 to 4,096 ranks; run.py prints it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tables import table

__all__ = ["describe_many_ranks", "measure_many_ranks"]

STRATEGIES = ("ddp", "fsdp")
# Phases that depend on the strategy, and those of the watch, which do not.
OF_STRATEGY = {"start": "the start, to the first step", "step": "a step", "save": "a save"}
OF_WATCH = {
    "watch: start": "the watch starts",
    "watch: a second": "the watch, each second",
    "a stop": "a coordinated stop",
    "a failure": "a failure is reported",
    "a time-out": "a collective times out",
}
COLUMNS = (
    ("messages", "store messages", 1.0),
    ("store_bytes", "store KB", 1e-3),
    ("collectives", "collectives", 1.0),
    ("collective_bytes", "their KB", 1e-3),
    ("objects", "objects", 1.0),
    ("files_written", "files written", 1.0),
    ("listings", "listings", 1.0),
    ("cpu_s", "CPU ms", 1e3),
)


def measure_many_ranks(*, is_quick: bool) -> dict[str, Any]:
    """Return the sizes, and rows with strategy, rank ("first", "middle"), phase, and the counts for each size."""
    sizes = (8, 32) if is_quick else (8, 64, 512, 4096)
    found = {strategy: [counts_of(size, strategy) for size in sizes] for strategy in STRATEGIES}
    rows = [
        {"strategy": strategy, "rank": rank, "phase": phase, "counts": [one[index][phase] for one in found[strategy]]}
        for strategy in STRATEGIES
        for phase in (*OF_STRATEGY, *(OF_WATCH if strategy == "ddp" else ()))
        for index, rank in enumerate(("first", "middle"))
    ]
    return {"sizes": list(sizes), "rows": rows}


def counts_of(size: int, strategy: str) -> list[dict[str, dict[str, float]]]:
    """Return the counts of the first rank and of a middle one, by phase."""
    command = [sys.executable, str(Path(__file__).with_name("rank.py")), str(size), strategy]
    text = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    found: list[dict[str, dict[str, float]]] = json.loads(text.splitlines()[-1])
    return found


def describe_many_ranks(numbers: dict[str, Any]) -> list[str]:
    """Return the section of RESULTS.md."""
    names = OF_STRATEGY | OF_WATCH
    sizes = ", ".join(f"{size:,}" for size in numbers["sizes"])

    def cell(row: dict[str, Any], kind: str, factor: float) -> str:
        values = [factor * counts.get(kind, 0) for counts in row["counts"]]
        return ", ".join(f"{value:,.0f}" if value >= 10 or value == int(value) else f"{value:.1f}" for value in values)

    return [
        "## Growth to thousands of ranks",
        f"What one rank does in a world of {sizes} ranks, 8 on a machine, by simulation (`benchmarks/many_ranks/`): "
        "each cell has one number for each size. Two ranks are real, the first and a middle one, with the Trainer, DDP"
        " or FSDP2, and torch's distributed checkpoint; the store and the process group are not, and answer at "
        "once for all others as the middle rank does. Counted are messages to the store and their bytes, "
        "collectives with the bytes that this rank holds of them (gradients and parameters included: two layers, "
        "590 KB), objects received in collectives, files below the checkpoint's folder, and the CPU time of the "
        "main thread, without the simulation's. Target: a count grows at most with log N. What grows faster, and "
        "why: a save on rank 0 holds one state of the random numbers for each rank (14 KB), and with `fsdp` one "
        "line of the manifest for each chunk; the report of a time-out has one entry for each rank, read by one "
        "rank; and in the CPU time of a step, each rank reads the sampler's indices of the whole global batch (0.9"
        " us for a rank and step), for only the sampler knows their order. Not shown: the time of the network and "
        "of a file system, which N ranks use at once; waiting for slow ranks; torch's own start of NCCL; ranks "
        "that all have something different where the simulation has two kinds; and the load of the store itself, "
        "which answers all ranks, 9 messages each second (fewer from 2,048 ranks on, when the ranks ask less "
        "often).",
        table(
            ("", "strategy", "rank", *(title for _, title, _ in COLUMNS)),
            (
                (
                    names[row["phase"]],
                    row["strategy"] if row["phase"] in OF_STRATEGY else "any",
                    row["rank"],
                    *(cell(row, kind, factor) for kind, _, factor in COLUMNS),
                )
                for row in numbers["rows"]
            ),
        ),
    ]
