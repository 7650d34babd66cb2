"""benchmarks/many_ranks/: no count of a rank grows like the number of ranks, but those that must."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "benchmarks" / "many_ranks" / "rank.py"
SMALL, LARGE = 8, 256

# One state of random numbers for each rank, and with fsdp lines of the manifest, are in a checkpoint; a report of a
# time-out names all ranks. Rank 0 alone has them.
MUST_GROW = {
    ("save", "objects"), ("save", "collective_bytes"), ("save", "files_written"),
    ("a time-out", "messages"), ("a time-out", "store_bytes"), ("a time-out", "keys_read"),
}  # fmt: skip


def counts_of(size: int, strategy: str) -> list[dict[str, dict[str, float]]]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    text = subprocess.check_output([sys.executable, str(SCRIPT), str(size), strategy], text=True, env=environment)
    found: list[dict[str, dict[str, float]]] = json.loads(text.splitlines()[-1])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_what_a_rank_does_grows_at_most_with_the_logarithm_of_the_number_of_ranks(strategy: str) -> None:
    for is_first, small, large in zip(
        (True, False), counts_of(SMALL, strategy), counts_of(LARGE, strategy), strict=True
    ):
        assert small.keys() == large.keys()
        for phase, counts in large.items():
            for kind, count in counts.items():
                if kind == "cpu_s" or (is_first and (phase, kind) in MUST_GROW):
                    continue
                # log 256 / log 8 is 2.7; in proportion to the ranks it would be 32 times as much.
                assert count <= 4 * small[phase].get(kind, 0) + 16, (is_first, phase, kind)
