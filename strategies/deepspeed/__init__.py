"""Training by a DeepSpeed engine: ZeRO stages 0 to 3, offloading."""

from __future__ import annotations

from .strategy import DeepSpeedStrategy

__all__ = ["DeepSpeedStrategy"]
