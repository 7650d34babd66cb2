"""Training with the same bits on every number of ranks."""

from __future__ import annotations

__all__: list[str] = []
