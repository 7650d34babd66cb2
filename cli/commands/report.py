"""`loopwright report`: an HTML report of runs. `loopwright watch`: live curves in the terminal."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Sequence

from rich.console import Console

from ...errors import LoopwrightError
from ...messages import counted
from ...report import read_runs, terminal, write_report
from ...report.runs import RunReader

_DIRECTORIES = "directory or URL of one or more runs; NAME=DIR names a run"


def report(arguments: Sequence[str]) -> int:
    """Write the report and return the exit code: 0, or 2 without runs or if it cannot be written.

    Args:
        arguments: Arguments after `loopwright report`.
    """
    parser = argparse.ArgumentParser(
        prog="loopwright report",
        description="Write an HTML report of runs from their logs and checkpoints: curves, metrics, checkpoints, "
        "configuration, environment. The page is self-contained and needs no network.",
        allow_abbrev=False,
    )
    parser.add_argument("directories", nargs="+", metavar="RUN_DIR", help=_DIRECTORIES)
    parser.add_argument(
        "-o", "--output", default="report.html", metavar="FILE", help="output file (default report.html)"
    )
    parser.add_argument("--title", help="heading (default: names of the runs)")
    _add_smoothing(parser, 0.6, "initial smoothing; 0 shows the logged values (default 0.6)")
    parser.add_argument("--no-checkpoints", action="store_true", help="skip checkpoints")
    given = parser.parse_args(arguments)

    def write() -> int:
        runs = read_runs(given.directories, checkpoints=not given.no_checkpoints)
        path = write_report(runs, given.output, title=given.title, smoothing=given.smoothing)
        metrics = len({name for run in runs for name in run.series})
        checkpoints = sum(len(run.checkpoints) for run in runs)
        sys.stdout.write(
            f"{path}: {counted(len(runs), 'run')}, {counted(metrics, 'metric')}, {counted(checkpoints, 'checkpoint')}, "
            f"{path.stat().st_size / 1e6:.1f} MB\n"
        )
        for run in runs:
            for problem in run.problems:
                sys.stderr.write(f"loopwright report: {run.name}: {problem}\n")
        return 0

    return _guarded("report", write)


def watch(arguments: Sequence[str]) -> int:
    """Show the curves until Ctrl-C and return the exit code: 0, or 2 if a directory does not exist.

    Args:
        arguments: Arguments after `loopwright watch`.
    """
    parser = argparse.ArgumentParser(
        prog="loopwright watch",
        description="Show the curves of runs in the terminal while they train; exit with Ctrl-C. If the output is not "
        "a terminal, they are printed once.",
        allow_abbrev=False,
    )
    parser.add_argument("directories", nargs="+", metavar="RUN_DIR", help=_DIRECTORIES)
    parser.add_argument("--every", type=float, default=2.0, metavar="SECONDS", help="refresh interval (default 2)")
    parser.add_argument(
        "--metric", action="append", default=[], metavar="PATTERN", help="show matching metrics only, e.g. '*loss'"
    )
    parser.add_argument("--once", action="store_true", help="print the curves once and exit")
    _add_smoothing(parser, 0.0, "0 shows the logged values, 0.9 a smooth curve (default 0)")
    given = parser.parse_args(arguments)
    if not given.every > 0:
        parser.error(f"expected --every above 0 seconds, got {given.every:g}")

    def show() -> int:
        reader, console = RunReader(given.directories), Console()
        if given.once:
            size = (console.width, terminal.NO_LIMIT)
            console.print(
                terminal.render_terminal(reader.read(), size, metrics=given.metric, smoothing=given.smoothing)
            )
            return 0
        with contextlib.suppress(KeyboardInterrupt):  # the regular end
            terminal.watch(reader, console, every_s=given.every, metrics=given.metric, smoothing=given.smoothing)
        return 0

    return _guarded("watch", show)


def _add_smoothing(parser: argparse.ArgumentParser, default: float, text: str) -> None:
    parser.add_argument("--smoothing", type=float, default=default, metavar="0..0.99", help=text)


def _guarded(command: str, work: Callable[[], int]) -> int:
    try:
        return work()
    except (LoopwrightError, OSError) as error:
        sys.stderr.write(f"loopwright {command}: {error}\n")
        return 2
