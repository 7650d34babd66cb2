"""The model summary: parameters, sizes and FLOPs, layer by layer."""

from __future__ import annotations

__all__: list[str] = []
