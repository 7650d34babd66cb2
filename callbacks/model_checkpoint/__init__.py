"""`ModelCheckpoint`: the schedule, the names and the retention of checkpoints."""

from __future__ import annotations

from .callback import ModelCheckpoint

__all__ = ["ModelCheckpoint"]
