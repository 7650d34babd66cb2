"""`loopwright fit | validate | test | predict`: training without a script."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from ..app import CLI


def train(arguments: Sequence[str]) -> int:
    """Run a subcommand with classes named by the user, and return the exit code.

    Args:
        arguments: The subcommand and its arguments.
    """
    # As with `python -m`, modules in the current folder can be imported.
    folder = os.getcwd()
    if folder not in sys.path:
        sys.path.insert(0, folder)
    CLI(args=arguments, program="loopwright")
    return 0
