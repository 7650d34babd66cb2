"""`LightningCLI` and its argument parser, over `lw.cli.CLI`."""

from __future__ import annotations

__all__: list[str] = []
