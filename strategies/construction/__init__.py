"""Building a module before it is sharded: deferred initialization, wrap policies, activation checkpointing."""

from __future__ import annotations

__all__: list[str] = []
