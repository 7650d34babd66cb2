"""How DeepSpeedStrategy saves and loads: what is the engine's, what is a pipeline's, and what is the user's module's.

The tensors themselves are deepspeed_state.py's, and of all stages of a pipeline deepspeed_stages.py's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from torch import nn

from .engine import EngineOptimizer, EngineRoot
from .pipeline.engine import PipelineRoot
from .pipeline.state import own_state, own_steps, whole_state, whole_steps
from .state import load_module, load_optimizer, module_state, optimizer_state

__all__ = ["fit_module_state", "load_steps", "saved_module_state", "saved_steps"]

# Any in this file: states are of the user's modules and optimizers.


def saved_module_state(
    module: nn.Module, original: nn.Module, state: dict[str, Any], *, is_frozen_left_out: bool
) -> dict[str, Any]:
    """Return a module's state in float32, under the user's names; with `Pending` for what is not whole.

    Args:
        module: What runs it.
        original: The user's.
        state: What the user's module itself says.
        is_frozen_left_out: Whether parameters that are not trained are left out.
    """
    if isinstance(module, EngineRoot) and module.is_pipeline:
        return whole_state(cast("PipelineRoot", module), state)
    if is_frozen_left_out:
        frozen = {name for name, one in original.named_parameters(remove_duplicate=False) if not one.requires_grad}
        state = {name: value for name, value in state.items() if name not in frozen}
    return module_state(module, state) if isinstance(module, EngineRoot) else state


def fit_module_state(
    root: EngineRoot, original: nn.Module, state: dict[str, Any], *, strict: bool, is_frozen_left_out: bool
) -> dict[str, Any]:
    """Put a state of whole tensors into the engine; return what the user's own module is to load. On every rank.

    Args:
        root: Around the module.
        original: The user's.
        state: Of any strategy.
        strict: Whether names that are missing or unexpected are errors.
        is_frozen_left_out: Whether parameters that are not trained may be missing.
    """
    if root.is_pipeline:
        state = own_state(cast("PipelineRoot", root), state, strict=strict)
    targets = {
        name: key for name in original.state_dict() for key in (name, name.replace("_orig_mod.", "")) if key in state
    }
    fitted = load_module(root, state, targets)
    if is_frozen_left_out:
        own = dict(original.named_parameters(remove_duplicate=False))
        fitted = {**{name: one.data for name, one in own.items() if not one.requires_grad}, **fitted}
    return fitted


def saved_steps(optimizer: EngineOptimizer) -> dict[str, Any]:
    """Return the state of an engine's optimizer, by the numbers of the user's parameters."""
    return whole_steps(optimizer) if optimizer.root.is_pipeline else optimizer_state(optimizer)


def load_steps(optimizer: EngineOptimizer, state: Mapping[str, Any]) -> None:
    """Put back a state of whole tensors, of any strategy."""
    load_optimizer(optimizer, own_steps(optimizer, state) if optimizer.root.is_pipeline else state)
