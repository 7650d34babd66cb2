"""The order of hooks at the end of a batch and of a validation: callbacks that save or stop before the module."""

from __future__ import annotations

from ....trainer.run import Run
from ..actions import lifecycle_of

__all__ = ["save_within_events"]


def save_within_events(run: Run) -> None:
    """Let checkpoint callbacks act before the module's own hook, and a checkpoint be taken within an event."""
    lifecycle_of(run).save_within_events()
