"""Progress bars: a base, one drawn by tqdm, one drawn by rich. Both write plain lines where nothing can be drawn."""

from __future__ import annotations

from .base import ProgressBar
from .rich_bar import RichProgressBar, RichProgressBarTheme
from .tqdm_bar import TQDMProgressBar

__all__ = ["ProgressBar", "RichProgressBar", "RichProgressBarTheme", "TQDMProgressBar"]
