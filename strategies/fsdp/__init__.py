"""Fully sharded data parallel training, on torch's `fully_shard`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...lazy import attach

if TYPE_CHECKING:
    from .strategy import FSDPStrategy

__all__ = ["FSDPStrategy"]

# The modules of this folder are parts of `ShardedStrategy`, from which the strategy derives.
__getattr__, __dir__ = attach(__name__, {"FSDPStrategy": "strategy"})
