"""Modules with Lightning's paths: which names each has, and what they mean here."""

from __future__ import annotations

__all__: list[str] = []
