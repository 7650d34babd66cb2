"""N-D parallelism: processes as a mesh with axes for stages, copies, shards, context and tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...lazy import attach

if TYPE_CHECKING:
    from .axes import MeshAxes
    from .strategy import MeshStrategy

__all__ = ["MeshAxes", "MeshStrategy"]

# The modules of this folder are parts of `ShardedStrategy`, from which the strategy derives.
__getattr__, __dir__ = attach(__name__, {"MeshAxes": "axes", "MeshStrategy": "strategy"})
