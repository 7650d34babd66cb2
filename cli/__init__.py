"""The `loopwright` command: `launch` starts a program in several processes, `lifecycle` prints the table of hooks."""

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
    parser = argparse.ArgumentParser(prog="loopwright", description="A trainer framework for PyTorch.")
    parser.add_argument("--version", action="version", version=f"loopwright {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    commands.add_parser("launch", help="start a program in several processes, on this machine or on several")
    commands.add_parser("lifecycle", help="print the table of hooks and their order, as Markdown")
    chosen = parser.parse_args(arguments)
    if chosen.command == "lifecycle":
        from ..trainer.lifecycle import markdown

        sys.stdout.write(markdown())
        return 0
    parser.print_help()
    return 2
