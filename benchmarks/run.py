"""Measure Loopwright against a hand-written loop: `make bench`, or `python benchmarks/run.py`.

Writes RESULTS.md and results/latest.json after each part; parts that `--only` leaves out keep their earlier numbers, if
these are of the same machine and versions. Each comparison runs both sides in turns, in CPU time, because other
programs disturb both alike then. `--quick` only shows that everything runs; its numbers mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from collections.abc import Iterable, Iterator
from datetime import date
from pathlib import Path
from typing import Any

import compare
import torch
from compiling import measure_compiling
from deepspeed_steps import measure_deepspeed
from fsdp import measure_fsdp
from growth import measure_growth
from language_models.memory import measure_recipes_memory
from language_models.peers import measure_recipes
from loading import measure_loading
from log_queue import time_logging
from many_ranks.measure import measure_many_ranks
from memory import measure_memory_of_strategies
from model_parallel.steps import measure_mesh
from peers_steps import measure_peers
from rank_growth import measure_rank_growth
from ranks import time_launches, time_steps_of_ranks
from report import SECTIONS, describe
from saving import time_saves, time_small_saves, time_stalls
from sharded_saves import measure_sharded_saves
from startup import time_first_steps, time_imports
from steps import count_calls, count_reads, time_steps
from surviving import measure_surviving
from xla import measure_xla

SAME = ("cpu", "cores", "system", "python", "torch")  # of the environment, for numbers that stand side by side


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few steps of everything, as a test")
    parser.add_argument(
        "--only",
        nargs="+",
        type=_parts,
        default=[list(SECTIONS)],
        metavar="PART",
        help=f"measure only these parts; of {', '.join(SECTIONS)}",
    )
    parser.add_argument(
        "--compare",
        nargs="?",
        const="",
        metavar="COMMIT",
        help="measure steps of the present tree and of a commit in turns, and say what became slower; without one, the "
        "commit of the stored results",
    )
    parser.add_argument("--bisect", action="store_true", help="with --compare: search for the commit that did it")
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
    }


def when() -> dict[str, Any]:
    """Return the date, and how busy the machine is."""
    load = round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else -1.0
    return {"date": date.today().isoformat(), "load": load}


def measure(parts: Iterable[str], *, is_quick: bool) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Run the chosen parts; yield the name of each, its numbers, and when it began."""
    for part in parts:
        began = when()
        print(f"measuring {part} ...", file=sys.stderr, flush=True)
        if part == "steps":
            numbers: Any = time_steps(num_batches=60 if is_quick else 1500, rounds=1 if is_quick else 7)
        elif part == "calls":
            numbers = count_calls(num_batches=60 if is_quick else 200)
        elif part == "peers":
            numbers = measure_peers(num_batches=60 if is_quick else 1000, rounds=1 if is_quick else 5)
        elif part == "growth":
            numbers = measure_growth(is_quick=is_quick)
        elif part == "rank-growth":
            numbers = measure_rank_growth(is_quick=is_quick)
        elif part == "many-ranks":
            numbers = measure_many_ranks(is_quick=is_quick)
        elif part == "reads":
            numbers = count_reads(num_batches=60 if is_quick else 500, log_every=10 if is_quick else 50)
        elif part == "imports":
            numbers = time_imports(processes=1 if is_quick else 7)
        elif part == "first-step":
            numbers = time_first_steps(processes=1 if is_quick else 5)
        elif part == "loading":
            numbers = measure_loading(num_batches=20 if is_quick else 200, rounds=1 if is_quick else 7)
        elif part == "saving":
            numbers = time_saves(num_parameters=2_000_000 if is_quick else 50_000_000, rounds=1 if is_quick else 5)
        elif part == "stalls":
            numbers = time_stalls(num_parameters=2_000_000 if is_quick else 50_000_000, rounds=1 if is_quick else 5)
        elif part == "small-saves":
            numbers = time_small_saves(num_tensors=1_000 if is_quick else 100_000, rounds=1 if is_quick else 5)
        elif part == "logging":
            numbers = time_logging(num_batches=30 if is_quick else 200)
        elif part == "ranks":
            numbers = time_steps_of_ranks(num_batches=60 if is_quick else 1000, rounds=1 if is_quick else 7)
        elif part == "launch":
            with tempfile.TemporaryDirectory() as folder:
                numbers = time_launches(processes=1 if is_quick else 5, folder=Path(folder))
        elif part == "fsdp":
            numbers = measure_fsdp(num_steps=10 if is_quick else 15, rounds=1 if is_quick else 2, is_quick=is_quick)
        elif part == "mesh":
            numbers = measure_mesh(num_steps=5 if is_quick else 20, rounds=1 if is_quick else 7, is_quick=is_quick)
        elif part == "deepspeed":
            numbers = measure_deepspeed(num_steps=5 if is_quick else 30, rounds=1 if is_quick else 3, is_quick=is_quick)
        elif part == "sharded-saves":
            numbers = measure_sharded_saves(megabytes=24 if is_quick else 256, rounds=1 if is_quick else 3)
        elif part == "surviving":
            numbers = measure_surviving(num_steps=16 if is_quick else 60, rounds=1 if is_quick else 3)
        elif part == "memory":
            numbers = measure_memory_of_strategies(is_quick=is_quick)
        elif part == "compiling":
            numbers = measure_compiling([1] if is_quick else [4, 12], rounds=1 if is_quick else 5, is_quick=is_quick)
        elif part == "xla":
            numbers = measure_xla(num_steps=20 if is_quick else 60, rounds=1 if is_quick else 3, is_quick=is_quick)
        elif part == "recipes-memory":
            numbers = measure_recipes_memory()
        elif part == "recipes":
            numbers = measure_recipes(num_steps=4 if is_quick else 30, rounds=1 if is_quick else 5)
        yield part, numbers, began


def earlier_results(file: Path, here: dict[str, Any], *, is_quick: bool) -> dict[str, Any]:
    """Return the parts of an earlier run of the same kind, on the same machine and versions; else nothing."""
    if not file.is_file():
        return {}
    earlier: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    is_same = all(earlier["environment"].get(key) == here[key] for key in SAME) and earlier["is_quick"] == is_quick
    return {part: earlier[part] for part in (*SECTIONS, "when") if is_same and part in earlier}


def main() -> None:
    args = parse_arguments()
    if args.compare is not None:
        sys.exit(compare.main(args.compare or None, bisects=args.bisect, is_quick=args.quick))
    folder = args.output / "results"
    folder.mkdir(parents=True, exist_ok=True)
    here = environment()
    earlier = earlier_results(folder / "latest.json", here, is_quick=args.quick)
    results = {**earlier, "environment": here, "is_quick": args.quick, "when": earlier.get("when", {})}
    for part, numbers, began in measure([part for parts in args.only for part in parts], is_quick=args.quick):
        results[part] = numbers
        results["when"][part] = began
        text = describe(results)
        (args.output / "RESULTS.md").write_text(text, encoding="utf-8")
        (folder / "latest.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
