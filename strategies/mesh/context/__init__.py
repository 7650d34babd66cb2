"""Context parallelism: processes that share the sequences of a batch."""

from __future__ import annotations

from .options import Context

__all__ = ["Context"]
