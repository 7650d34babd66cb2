"""Progress bars: a base, one drawn by tqdm, one drawn by rich. Both write plain lines where nothing can be drawn."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...lazy import attach

if TYPE_CHECKING:
    from .base import ProgressBar
    from .rich_bar import RichProgressBar, RichProgressBarTheme
    from .tqdm_bar import TQDMProgressBar

__all__ = ["ProgressBar", "RichProgressBar", "RichProgressBarTheme", "TQDMProgressBar"]

# Each bar imports the library that draws it.
__getattr__, __dir__ = attach(
    __name__,
    {
        "ProgressBar": "base",
        "RichProgressBar": "rich_bar",
        "RichProgressBarTheme": "rich_bar",
        "TQDMProgressBar": "tqdm_bar",
    },
)
