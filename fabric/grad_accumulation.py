"""Which strategies can sum gradients in float32 where parameters have 16 bits, and who does it."""

from __future__ import annotations

import torch

from ..errors import ConfigError
from ..strategies import Strategy

__all__ = ["set_grad_accumulation_dtype"]

_FLOAT32 = (torch.float32, "float32", "fp32", "32")


def set_grad_accumulation_dtype(strategy: Strategy, wanted: object) -> None:
    """Let a strategy sum gradients in float32 over a window and over ranks.

    Raises:
        ConfigError: Something else than float32 is wanted, or the strategy cannot; says why.
    """
    if not any(wanted is one or wanted == one for one in _FLOAT32):
        raise ConfigError(
            f"Trainer: grad_accumulation_dtype={wanted!r}.",
            fix="pass 'float32', or None for the dtype of the parameters.",
        )
    refusal = strategy.accumulation_refusal(torch.float32)
    if refusal is not None:
        reason, fix = refusal
        raise ConfigError(
            f"grad_accumulation_dtype='float32' cannot be used with {type(strategy).__name__}: {reason}.", fix=f"{fix}."
        )
    strategy.accumulate_dtype = torch.float32
