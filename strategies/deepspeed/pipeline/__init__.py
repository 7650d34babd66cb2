"""DeepSpeed's `PipelineModule`: layers on several stages, one stage per rank of a replica."""

from __future__ import annotations

__all__: list[str] = []
