"""Detection of terminals and notebooks, on which progress bars can be drawn."""

from __future__ import annotations

import os
import sys
from typing import TextIO

__all__ = ["can_draw", "is_notebook", "is_terminal"]


def is_terminal(stream: TextIO) -> bool:
    """Whether the stream is a terminal on which the cursor can be moved."""
    try:
        return stream.isatty() and os.environ.get("TERM") != "dumb"
    except (AttributeError, ValueError):
        return False  # closed, or replaced by an object that is not a file


def is_notebook() -> bool:
    """Whether a Jupyter kernel runs this process. Reads `sys.modules` only."""
    return "ipykernel" in sys.modules and "IPython" in sys.modules


def can_draw(stream: TextIO) -> bool:
    """Whether a live bar can be drawn: on a terminal or in a notebook."""
    return is_terminal(stream) or is_notebook()
