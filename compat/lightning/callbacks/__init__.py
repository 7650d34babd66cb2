"""Callbacks as programs for Lightning expect them: methods, attributes, and those that packages add."""

from __future__ import annotations

__all__: list[str] = []
