"""Settings: names, types and values of arguments, and the objects that are made of them."""

from __future__ import annotations

__all__: list[str] = []
