"""Fully sharded data parallel training, on torch's `fully_shard`."""

from __future__ import annotations

from .strategy import FSDPStrategy

__all__ = ["FSDPStrategy"]
