"""Which strategies can sum gradients in float32 where parameters have 16 bits, and who does it."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import ConfigError
from ..strategies import Strategy

__all__ = ["set_grad_accumulation_dtype"]

_FLOAT32 = (torch.float32, "float32", "fp32", "32")


def set_grad_accumulation_dtype(strategy: Strategy, wanted: Any) -> None:  # Any: whatever the user typed
    """Let a strategy sum gradients in float32 over a window and over ranks.

    Raises:
        ConfigError: Something else than float32 is wanted, or the strategy cannot; says why.
    """
    if not any(wanted is one or wanted == one for one in _FLOAT32):
        raise ConfigError(
            f"Trainer: grad_accumulation_dtype={wanted!r}.",
            fix="pass 'float32', or None for the dtype of the parameters.",
        )
    plan = getattr(strategy, "plan", None)
    reason = None
    if getattr(strategy, "accelerator_kind", None) == "xla":
        reason, fix = "XLA's graphs sum gradients by themselves", "leave it out, or pass precision='bf16-mixed'"
    elif strategy.strategy_name == "dp":
        reason, fix = "torch adds up the gradients of its devices", "pass strategy='ddp'"
    elif getattr(plan, "mixed_precision", None) is not None:
        reason, fix = "its mixed_precision= says the dtypes", "pass reduce_dtype=torch.float32 there"
    elif getattr(strategy, "ddp_comm_hook", None) is not None:
        reason, fix = "its ddp_comm_hook communicates the gradients", "leave out one of the two"
    elif not strategy.sums_gradients_in(torch.float32):
        reason, fix = "it does not say how it sums gradients", "pass strategy='ddp', 'fsdp' or 'deepspeed'"
    if reason is not None:
        raise ConfigError(
            f"grad_accumulation_dtype='float32' cannot be used with {type(strategy).__name__}: {reason}.", fix=f"{fix}."
        )
    strategy.accumulate_dtype = torch.float32
