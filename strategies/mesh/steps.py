"""Callables that run the steps of a module whose layers are split over the axis tp."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import nn

from .buffers import check_buffers
from .tensor.loss import loss_parallel_context
from .tensor.verify import recording, verify_plan

if TYPE_CHECKING:
    from ...protocols import StepFunction
    from .tensor import TensorPlan

__all__ = ["split_step", "verified_step"]


def split_step(plan: TensorPlan, module: nn.Module, step: StepFunction) -> StepFunction:
    """Return what runs a method of the module, which reads parameters as plain tensors.

    Args:
        plan: Applied to the module.
        module: The user's.
        step: One of its methods; not its forward, whose hooks do this.
    """

    def run(*args: object, **kwargs: object) -> object:
        with plan.running(module), loss_parallel_context(plan):
            return step(*args, **kwargs)

    return run


def verified_step(plan: TensorPlan, module: nn.Module, step: StepFunction, is_due: Callable[[], bool]) -> StepFunction:
    """Return a training step that compares the split layers with full ones when `is_due` says so."""

    def run(*args: object, **kwargs: object) -> object:
        if not (torch.is_grad_enabled() and is_due()):
            return step(*args, **kwargs)
        with recording(plan, module) as calls:
            output = step(*args, **kwargs)
        verify_plan(plan, module, calls)
        assert plan.mesh is not None, "the plan is applied"
        check_buffers(module, plan.mesh.get_group(), "tp")
        return output

    return run
