"""The `loopwright` command. This version has `lifecycle`, which prints the table of hooks, and `version`."""

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

    parser = argparse.ArgumentParser(prog="loopwright", description="A trainer framework for PyTorch.")
    parser.add_argument("--version", action="version", version=f"loopwright {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    commands.add_parser("lifecycle", help="print the table of hooks and their order, as Markdown")
    chosen = parser.parse_args(arguments)
    if chosen.command == "lifecycle":
        from ..trainer.lifecycle import markdown

        sys.stdout.write(markdown())
        return 0
    parser.print_help()
    return 2
