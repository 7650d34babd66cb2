"""Sources of the batch stream: one for each kind of loader, each with a position that resumes."""

from __future__ import annotations

__all__: list[str] = []
