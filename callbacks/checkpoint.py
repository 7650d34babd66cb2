"""The mark of callbacks that write checkpoints. The Trainer moves them to the end: they save everyone's state."""

from __future__ import annotations

from .base import Callback

__all__ = ["Checkpoint"]


class Checkpoint(Callback):
    """Write checkpoints. Its hooks run after everything else at an event: module, metrics, loggers, other callbacks."""

    runs_last = True
    hears_every_step = True  # writing a checkpoint takes all ranks
