"""`loopwright fit | validate | test | predict`: the command line without a script."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

__all__ = ["train"]


def train(arguments: Sequence[str]) -> int:
    """Run a subcommand with classes that the user names, and return the exit code.

    Args:
        arguments: What came after `loopwright`, with the subcommand.
    """
    from ..app import CLI

    # As with `python -m`: modules of the current folder can be named.
    folder = os.getcwd()
    if folder not in sys.path:
        sys.path.insert(0, folder)
    CLI(args=arguments, program="loopwright")
    return 0
