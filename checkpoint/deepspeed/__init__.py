"""Folders that DeepSpeed's engines write: read into full tensors, and written in the universal layout."""

from __future__ import annotations

__all__: list[str] = []
