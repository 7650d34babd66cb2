"""The model of a recipe: its settings, how it is opened and checked, its adapters and its fingerprint."""

from __future__ import annotations

__all__: list[str] = []
