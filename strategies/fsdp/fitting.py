"""States of full tensors, sharded like a module and its optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..distributed.shards import as_shards, fits, is_sharded, read_full

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from ...protocols import StateDict

# Any in this file: states, whose tensors are full, in a file, or sharded.


def fit_module_state(target: Mapping[str, Any], state: Mapping[str, Any]) -> StateDict:
    """Return the state with tensors sharded like the module's; what does not fit stays full, and torch raises."""
    fitted = {}
    for name, value in state.items():
        own = target.get(name)
        if is_sharded(own) and fits(value, own.shape):
            fitted[name] = as_shards(value, own, is_kept=False)  # the module copies it into its own memory
        else:
            fitted[name] = read_full(value)
    return fitted


def fit_optimizer_state(optimizer: Optimizer, state: Mapping[str, Any]) -> StateDict:
    """Return an optimizer's state with tensors of their parameter's shape sharded like it."""
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    if len(parameters) != len(numbers):
        return {**state}  # the optimizer names what does not fit
    parameter_of = dict(zip(numbers, parameters, strict=True))
    entries = {
        number: fit_state_of(parameter_of[number], own) if number in parameter_of else own
        for number, own in state["state"].items()
    }
    return {**state, "state": entries}


def fit_state_of(parameter: Tensor, state: object) -> object:
    """Return what an optimizer keeps for one parameter, sharded like the parameter."""
    if not isinstance(state, Mapping):
        return state
    return {
        key: as_shards(value, parameter)
        # A count of steps has the shape of a parameter with one number, and is none of it.
        if is_sharded(parameter) and (parameter.ndim or key != "step") and fits(value, parameter.shape)
        else read_full(value)
        for key, value in state.items()
    }
