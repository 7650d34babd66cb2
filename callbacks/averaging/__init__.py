"""Averages of weights: EMA, stochastic weight averaging, and torch's averaging functions."""

from __future__ import annotations

__all__: list[str] = []
