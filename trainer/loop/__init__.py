"""The loops and the training step: windows, losses, schedules, manual optimization, and when a run stops."""

from __future__ import annotations

__all__: list[str] = []
