"""Shared by engines with several processes: rendezvous, collectives, gradients, clipping, sharded tensors."""

from __future__ import annotations

__all__: list[str] = []
