"""Tools on checkpoints of any format: convert, diff, inspect, verify."""

from __future__ import annotations

__all__: list[str] = []
