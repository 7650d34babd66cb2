"""Advice on torch's error about a loss without a graph. Imported when a run ends with an error."""

from __future__ import annotations

from torch import nn

_FREED_GRAPH = "backward through the graph a second time"
_NO_GRAPH = "does not require grad and does not have a grad_fn"


def advice_on_graph(error: Exception, module: nn.Module, hook: str) -> str | None:
    """Return advice for a backward pass without a graph, or with a freed one; None for other errors.

    Args:
        error: What ended a run.
        module: Its parameters are checked.
        hook: The hook in which it was raised; "" for none.
    """
    if _FREED_GRAPH in str(error) and hook != "training_step":
        return (
            "Loopwright: the Trainer calls backward() on the loss that training_step returns, and its graph, or a part "
            "of it, is freed. To fix it: leave out backward() and step() in training_step, or set "
            "self.automatic_optimization = False; detach() what is kept from an earlier batch"
        )
    if _NO_GRAPH not in str(error):
        return None
    if hook in ("validation_step", "test_step", "predict_step"):
        return (
            f"Loopwright: {hook} runs without gradients. To fix it: compute the loss and call backward() within "
            "`with torch.enable_grad():`, or train in training_step"
        )
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


def advice_on_evaluation(error: Exception, verb: str | None, inference_mode: bool) -> str | None:
    """Return advice for a validate, test or predict that computes gradients without a graph; None for other errors.

    Args:
        error: What ended the run.
        verb: Of the Trainer.
        inference_mode: The Trainer's argument.
    """
    if _NO_GRAPH not in str(error) and "inference tensor" not in str(error).lower():
        return None
    enable = "compute gradients within `with torch.enable_grad():`"
    if not inference_mode:
        return f"Loopwright: trainer.{verb} runs without gradients. To fix it: {enable}"
    return (
        f"Loopwright: trainer.{verb} runs in inference mode, where torch records no graph, even under "
        f"torch.enable_grad(). To fix it: pass Trainer(inference_mode=False), and {enable}"
    )
