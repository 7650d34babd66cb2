"""After a training: finding its result, merging adapters, and writing a folder that transformers loads."""

from __future__ import annotations

__all__: list[str] = []
