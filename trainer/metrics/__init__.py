"""Logged metrics: values on their device until a log boundary, over windows, epochs and ranks."""

from __future__ import annotations

__all__: list[str] = []
