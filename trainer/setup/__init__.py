"""The beginning of a run: arguments, loaders, callbacks, compilation, and continuing after an earlier fit."""

from __future__ import annotations

__all__: list[str] = []
