"""Planning: what a training needs in memory, communication and time, before it is launched."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..lazy import attach
from .formulas import (
    ParameterBytes,
    bubble_fraction,
    bytes_per_parameter,
    chinchilla_tokens,
    dense_flops_per_token,
    ring_all_reduce_s,
    ring_bytes,
    scaled_lr,
    state_bytes,
    training_cost,
    training_flops,
    training_hours,
    transformer_activation_bytes,
)

if TYPE_CHECKING:
    from .planner import plan as plan
    from .table import Plan as Plan
    from .table import Row as Row

__all__ = [
    "ParameterBytes",
    "Plan",
    "Row",
    "bubble_fraction",
    "bytes_per_parameter",
    "chinchilla_tokens",
    "dense_flops_per_token",
    "plan",
    "ring_all_reduce_s",
    "ring_bytes",
    "scaled_lr",
    "state_bytes",
    "training_cost",
    "training_flops",
    "training_hours",
    "transformer_activation_bytes",
]

__getattr__, __dir__ = attach(__name__, {"Plan": "table", "Row": "table", "plan": "planner"})
