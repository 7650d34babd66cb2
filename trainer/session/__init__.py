"""A verb from its arguments to its end: loaders, callbacks, compilation, and continuing after an earlier fit."""

from __future__ import annotations

__all__: list[str] = []
