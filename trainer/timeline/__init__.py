"""`trainer.timeline`: where the time of a fit went."""

from __future__ import annotations

from .timeline import Timeline

__all__ = ["Timeline"]
