"""What this machine offers for training, and what is wrong with it. `loopwright doctor` (cli/) prints it."""

from __future__ import annotations

from .examination import examine
from .finding import Finding, Level

__all__ = ["Finding", "Level", "examine"]
