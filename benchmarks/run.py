"""Measure Loopwright against a hand-written loop: `make bench`, or `python benchmarks/run.py`.

Writes RESULTS.md and results/latest.json. Each comparison runs both sides in turns, in CPU time, because other programs
disturb both alike then. `--quick` only shows that everything runs; its numbers mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from collections.abc import Iterable
from datetime import date
from pathlib import Path
from typing import Any

import torch
from compiling import measure_compiling
from deepspeed_steps import measure_deepspeed
from fsdp import measure_fsdp
from log_queue import time_logging
from memory import measure_memory_of_strategies
from mesh import measure_mesh
from ranks import time_launches, time_steps_of_ranks
from report import SECTIONS, describe
from saving import time_saves
from sharded_saves import measure_sharded_saves
from startup import time_first_steps, time_imports
from steps import count_calls, count_reads, time_steps
from xla import measure_xla


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few steps of everything, as a test")
    parser.add_argument(
        "--only",
        nargs="+",
        type=_parts,
        default=[list(SECTIONS)],
        metavar="PART",
        help=f"leave out the other parts; of {', '.join(SECTIONS)}",
    )
    parser.add_argument("--output", type=Path, default=Path(__file__).parent, help="folder of RESULTS.md")
    return parser.parse_args()


def _parts(text: str) -> list[str]:
    """Return the names in a list with commas."""
    unknown = set(text.split(",")) - set(SECTIONS)
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown: {', '.join(sorted(unknown))}; use some of {', '.join(SECTIONS)}")
    return text.split(",")


def environment() -> dict[str, Any]:
    """Say what the numbers depend on; no names of machines or people."""
    model = platform.processor() or platform.machine()
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo") as info:
            model = next((line.split(":")[1].strip() for line in info if line.startswith("model name")), model)
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load": round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else -1.0,
        "date": date.today().isoformat(),
    }


def measure(parts: Iterable[str], *, is_quick: bool) -> dict[str, Any]:
    """Run the chosen parts and return their numbers."""
    results: dict[str, Any] = {"environment": environment(), "is_quick": is_quick}
    for part in parts:
        print(f"measuring {part} ...", file=sys.stderr, flush=True)
        if part == "steps":
            results[part] = time_steps(num_batches=60 if is_quick else 1500, rounds=1 if is_quick else 7)
        elif part == "calls":
            results[part] = count_calls(num_batches=60 if is_quick else 200)
        elif part == "reads":
            results[part] = count_reads(num_batches=60 if is_quick else 500, log_every=10 if is_quick else 50)
        elif part == "imports":
            results[part] = time_imports(processes=1 if is_quick else 7)
        elif part == "first-step":
            results[part] = time_first_steps(processes=1 if is_quick else 5)
        elif part == "saving":
            results[part] = time_saves(
                num_parameters=2_000_000 if is_quick else 50_000_000, rounds=1 if is_quick else 5
            )
        elif part == "logging":
            results[part] = time_logging(num_batches=30 if is_quick else 200)
        elif part == "ranks":
            results[part] = time_steps_of_ranks(num_batches=60 if is_quick else 1000, rounds=1 if is_quick else 7)
        elif part == "launch":
            with tempfile.TemporaryDirectory() as folder:
                results[part] = time_launches(processes=1 if is_quick else 5, folder=Path(folder))
        elif part == "fsdp":
            results[part] = measure_fsdp(
                num_steps=10 if is_quick else 15, rounds=1 if is_quick else 2, is_quick=is_quick
            )
        elif part == "mesh":
            results[part] = measure_mesh(
                num_steps=5 if is_quick else 20, rounds=1 if is_quick else 7, is_quick=is_quick
            )
        elif part == "deepspeed":
            results[part] = measure_deepspeed(
                num_steps=5 if is_quick else 30, rounds=1 if is_quick else 3, is_quick=is_quick
            )
        elif part == "sharded-saves":
            results[part] = measure_sharded_saves(megabytes=24 if is_quick else 256, rounds=1 if is_quick else 3)
        elif part == "memory":
            results[part] = measure_memory_of_strategies(is_quick=is_quick)
        elif part == "compiling":
            results[part] = measure_compiling(
                [1] if is_quick else [4, 12], rounds=1 if is_quick else 8, is_quick=is_quick
            )
        elif part == "xla":
            results[part] = measure_xla(
                num_steps=20 if is_quick else 60, rounds=1 if is_quick else 3, is_quick=is_quick
            )
    return results


def main() -> None:
    args = parse_arguments()
    results = measure([part for parts in args.only for part in parts], is_quick=args.quick)
    text = describe(results)
    print(text)
    folder = args.output / "results"
    folder.mkdir(parents=True, exist_ok=True)
    (args.output / "RESULTS.md").write_text(text, encoding="utf-8")
    (folder / "latest.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
