"""`loopwright doctor`: checks a machine for training."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from ...console import wants_color
from ...doctor import examine
from .doctor_ranks import add_rank_options, examine_all_ranks, wants_ranks

if TYPE_CHECKING:
    from ...doctor import Finding

_MARKS = {"ok": " ", "note": "-", "warning": "!", "problem": "X"}
_COLORS = {"warning": "33", "problem": "31"}
_NAME_WIDTH = 24


def doctor(arguments: Sequence[str]) -> int:
    """Print the findings and return the exit code: 0, or 1 for a problem.

    Args:
        arguments: Arguments after `loopwright doctor`.
    """
    parser = _parser()
    given = parser.parse_args(arguments)
    for name in ("disk_size", "timeout"):
        if not getattr(given, name) >= 0:
            parser.error(f"--{name.replace('_', '-')} {getattr(given, name):g}: expected a number of at least 0")
    if wants_ranks(given):
        return examine_all_ranks(given, parser, print_json if given.json else print_text)
    findings = examine(given.folder.expanduser(), disk_bytes=int(given.disk_size * 1e6), timeout_s=given.timeout)
    levels = print_json(findings) if given.json else print_text(findings)
    return 1 if "problem" in levels else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="loopwright doctor",
        description="Check this machine for training: devices, packages, import of engines, compilers, shared memory, "
        "limits, connections between processes, and the disk for checkpoints. Marks: ! slow or likely to fail under "
        "load; X not working; - missing and optional. The exit code is 1 if there is an X.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--folder", type=Path, default=Path(), metavar="DIR", help="folder for checkpoints (default: current folder)"
    )
    parser.add_argument(
        "--disk-size",
        type=float,
        default=256,
        metavar="MB",
        help="amount to write and read there; 0 skips the test (default 256)",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=60,
        metavar="SECONDS",
        help="time limit for the import of an engine, and for ranks to connect (default 60)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    add_rank_options(parser)
    return parser


def print_json(findings: Iterable[Finding]) -> list[str]:
    """Print findings as one JSON document, and return their levels."""
    entries = [{**asdict(one), "level": one.level.value} for one in findings]
    sys.stdout.write(json.dumps(entries, indent=2) + "\n")
    return [str(entry["level"]) for entry in entries]


def print_text(findings: Iterable[Finding]) -> list[str]:
    """Print findings under their sections, and return their levels."""
    levels: list[str] = []
    section = None
    paint = wants_color(sys.stdout)
    for one in _with_progress(findings):
        if one.section != section:
            sys.stdout.write(f"{'' if section is None else chr(10)}{one.section}\n")
            section = one.section
        mark = _MARKS[one.level.value]
        color = _COLORS.get(one.level.value) if paint else None
        mark = mark if color is None else f"\x1b[{color}m{mark}\x1b[0m"
        sys.stdout.write(f"{mark} {one.name:{_NAME_WIDTH}} {one.value}\n")
        if one.advice:
            sys.stdout.write(f"  {'':{_NAME_WIDTH}} -> {one.advice}\n")
        sys.stdout.flush()  # an engine's import takes seconds: show previous lines at once
        levels.append(one.level.value)
    problems, warnings = levels.count("problem"), levels.count("warning")
    sys.stdout.write(f"\n{_count(problems, 'problem')}, {_count(warnings, 'warning')}\n")
    return levels


def _with_progress(findings: Iterable[Finding]) -> Iterator[Finding]:
    """Yield the findings; on a terminal, a line on standard error shows that the next check is running."""
    if not (sys.stderr.isatty() and sys.stdout.isatty()):
        yield from findings
        return
    began_s = time.monotonic()
    number = 0
    found = iter(findings)
    while True:
        sys.stderr.write(f"\r{number} checks done, {time.monotonic() - began_s:.0f} s; an import may take a minute ...")
        sys.stderr.flush()
        one = next(found, None)
        sys.stderr.write("\r\x1b[K")
        sys.stderr.flush()
        if one is None:
            return
        number += 1
        yield one


def _count(number: int, name: str) -> str:
    return f"{number or 'no'} {name if number == 1 else f'{name}s'}"
