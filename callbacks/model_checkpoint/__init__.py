"""`ModelCheckpoint`: when to write checkpoints, under which names, and which to keep."""

from __future__ import annotations

from .callback import ModelCheckpoint

__all__ = ["ModelCheckpoint"]
