"""Detection of terminals and notebooks, on which progress bars can be drawn."""

from __future__ import annotations

import os
from typing import TextIO

from ...console import is_notebook


def is_terminal(stream: TextIO) -> bool:
    """Whether the stream is a terminal on which the cursor can be moved."""
    try:
        return stream.isatty() and os.environ.get("TERM") != "dumb"
    except (AttributeError, ValueError):
        return False  # closed, or replaced by an object that is not a file


def can_draw(stream: TextIO) -> bool:
    """Whether a live bar can be drawn: on a terminal or in a notebook."""
    return is_terminal(stream) or is_notebook()
