"""Results of layers of experts that run on another stage of a pipeline."""

from __future__ import annotations

import torch
from torch import nn

from ..pipeline.remote_tensors import RemoteTensor
from .sharding import experts_in

__all__ = ["leave_results"]

_RESULTS = ("balance_loss", "tokens_per_expert")


def leave_results(module: nn.Module) -> None:
    """Let the results of layers on other stages be an error where a step reads them, and not None.

    Args:
        module: The user's module, split into stages.
    """
    for name, one in experts_in(module).items():
        there = one.router.__dict__.get("weight")
        if isinstance(there, RemoteTensor):
            for key in _RESULTS:
                setattr(one, key, RemoteTensor.of(torch.empty(()), f"{name}.{key}", there.stage, remedy=_REMEDY))


_REMEDY = (
    "train without pp to add balance losses to the loss: they are known on the stages that have the layers, and the "
    "loss on the last one; or leave them out."
)
