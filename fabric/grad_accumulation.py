"""`grad_accumulation_dtype`: accumulation of 16-bit gradients in float32."""

from __future__ import annotations

import torch

from ..errors import ConfigError
from ..strategies import Strategy

_FLOAT32 = (torch.float32, "float32", "fp32", "32")


def set_grad_accumulation_dtype(strategy: Strategy, wanted: object) -> None:
    """Configure a strategy to sum gradients in float32 over an accumulation window and over ranks.

    Raises:
        ConfigError: A dtype other than float32 is requested, or the strategy does not support it.
    """
    if not any(wanted is one or wanted == one for one in _FLOAT32):
        raise ConfigError(
            f"Expected grad_accumulation_dtype to be 'float32' or None, got grad_accumulation_dtype={wanted!r}.",
            fix="pass 'float32', or None for the dtype of the parameters.",
        )
    traits = strategy.traits
    refusal = traits.accumulation_refusal
    can_sum = traits.sums_gradients_itself or traits.averages_after_backward or strategy.world_size == 1
    if refusal is None and not can_sum:
        refusal = ("it does not say how it sums gradients", "pass strategy='ddp', 'fsdp' or 'deepspeed'")
    if refusal is not None:
        reason, fix = refusal
        raise ConfigError(
            f"grad_accumulation_dtype='float32' cannot be used with {type(strategy).__name__}: {reason}.", fix=f"{fix}."
        )
    strategy.accumulate_dtype = torch.float32
