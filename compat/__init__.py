"""Other frameworks' names on Loopwright, so that programs written for them run unmodified."""

from __future__ import annotations

__all__: list[str] = []
