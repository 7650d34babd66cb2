"""Checkpoints that are one file: the archive, its digest, restricted reading, disks and URLs."""

from __future__ import annotations

__all__: list[str] = []
