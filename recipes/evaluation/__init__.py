"""`evaluate`: the loss on held-out data, and tasks of lm-eval."""

from __future__ import annotations

__all__: list[str] = []
