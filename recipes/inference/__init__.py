"""Text from a trained model: sampling, `generate` and `chat`."""

from __future__ import annotations

__all__: list[str] = []
