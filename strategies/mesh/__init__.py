"""N-D parallelism: processes as a mesh with axes for stages, copies, shards, context and tensors."""

from __future__ import annotations

from .axes import MeshAxes
from .strategy import MeshStrategy

__all__ = ["MeshAxes", "MeshStrategy"]
