"""Saves in the background: copies of a checkpoint in host memory, and the thread that writes them."""

from __future__ import annotations

__all__: list[str] = []
