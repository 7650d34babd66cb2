"""Mixture of experts: the layer, and its experts sharded over processes."""

from __future__ import annotations

from .layer import Experts

__all__ = ["Experts"]
