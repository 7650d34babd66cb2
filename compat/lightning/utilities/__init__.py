"""Lightning's helper functions and constants."""

from __future__ import annotations

__all__: list[str] = []
