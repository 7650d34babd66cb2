"""Callbacks as programs for Lightning see them: what they override, ask for and find installed."""

from __future__ import annotations

__all__: list[str] = []
