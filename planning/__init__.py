"""Planning: what a training needs in memory, communication and time, before it is launched."""

from __future__ import annotations

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

__all__ = [
    "ParameterBytes",
    "bubble_fraction",
    "bytes_per_parameter",
    "chinchilla_tokens",
    "dense_flops_per_token",
    "ring_all_reduce_s",
    "ring_bytes",
    "scaled_lr",
    "state_bytes",
    "training_cost",
    "training_flops",
    "training_hours",
    "transformer_activation_bytes",
]
