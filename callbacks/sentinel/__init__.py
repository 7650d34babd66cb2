"""`Sentinel`: finds wrong bits in weights, gradients and optimizer states of ranks that must have the same."""

from __future__ import annotations

__all__: list[str] = []
