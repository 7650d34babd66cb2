"""The `loopwright` command: `launch` starts a program in several processes, `lifecycle` prints the table of hooks,
`report` makes a page of runs, `watch` shows them in the terminal, `checkpoint` looks into checkpoints, `doctor` at this
machine."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

__all__ = ["run"]


def run(arguments: Sequence[str]) -> int:
    """Run the command line and return its exit code.

    Args:
        arguments: What came after the command's name.
    """
    from .. import __version__

    if arguments and arguments[0] == "launch":
        # Its options end where the program begins, whose options are none of ours: it reads them by itself.
        from .launch import launch

        return launch(arguments[1:])
    if arguments and arguments[0] in ("report", "watch"):
        from . import report

        return (report.report if arguments[0] == "report" else report.watch)(arguments[1:])
    if arguments and arguments[0] == "doctor":
        from .doctor import doctor

        return doctor(arguments[1:])
    if arguments and arguments[0] == "checkpoint":
        from .checkpoint import checkpoint

        return checkpoint(arguments[1:])
    parser = argparse.ArgumentParser(prog="loopwright", description="A trainer framework for PyTorch.")
    parser.add_argument("--version", action="version", version=f"loopwright {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    commands.add_parser("launch", help="start a program in several processes, on this machine or on several")
    commands.add_parser("checkpoint", help="look into checkpoints, check, compare and convert them")
    commands.add_parser("doctor", help="say what this machine offers for training, and what is wrong with it")
    commands.add_parser("lifecycle", help="print the table of hooks and their order, as Markdown")
    commands.add_parser("report", help="make one HTML page of runs: curves, numbers, checkpoints, configuration")
    commands.add_parser("watch", help="show the curves of runs in the terminal while they train")
    chosen = parser.parse_args(arguments)
    if chosen.command == "lifecycle":
        from ..trainer.lifecycle import markdown

        sys.stdout.write(markdown())
        return 0
    parser.print_help()
    return 2
