"""The state of a run in checkpoints: when it is saved, how it is restored, where it is found."""

from __future__ import annotations

__all__: list[str] = []
