"""Loopwright inside other systems; each module is imported by the programs that need it."""

from __future__ import annotations

__all__: list[str] = []
