"""Tensor parallelism: Linear layers and embeddings whose weights are split over ranks, by a plan.

A plan comes from the user, from the module, from transformers, or from the graph of the module.
"""

from __future__ import annotations

from .plan import TensorPlan, resolve_plan
from .styles import Colwise, Embedding, PackedColwise, Replicated, Rowwise

__all__ = ["Colwise", "Embedding", "PackedColwise", "Replicated", "Rowwise", "TensorPlan", "resolve_plan"]
