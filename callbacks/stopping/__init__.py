"""Callbacks that end a run: early stopping, time limits, stop files, preemption."""

from __future__ import annotations

__all__: list[str] = []
