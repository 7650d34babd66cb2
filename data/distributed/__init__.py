"""Data on several processes: sharded over ranks, synchronized at the end of an epoch, evaluated once."""

from __future__ import annotations

__all__: list[str] = []
