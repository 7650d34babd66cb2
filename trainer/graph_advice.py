"""Advice on torch's error about a loss without a graph. Imported when a fit ends with an error."""

from __future__ import annotations

from torch import nn

__all__ = ["advice_on_graph"]

_NO_GRAPH = "does not require grad and does not have a grad_fn"


def advice_on_graph(error: Exception, module: nn.Module) -> str | None:
    """Return what to do where a backward pass began at a tensor without a graph; None for other errors."""
    if _NO_GRAPH not in str(error):
        return None
    parameters = list(module.parameters())
    if parameters and not any(one.requires_grad for one in parameters):
        return (
            f"Loopwright: the loss depends on no trained parameter: all {len(parameters)} parameters of "
            f"{type(module).__name__} are frozen. To fix it: call requires_grad_(True) on those that are to be "
            "trained, before the optimizer is made"
        )
    return (
        "Loopwright: the loss of training_step has no graph (requires_grad is False). To fix it: look for detach(), "
        "item(), numpy(), torch.no_grad(), argmax or torch.tensor(...) between the model's output and the loss"
    )
