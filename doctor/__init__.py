"""Checks of this machine for training."""

from __future__ import annotations

from .examination import examine
from .finding import Finding, Level

__all__ = ["Finding", "Level", "examine"]
