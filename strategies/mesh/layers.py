"""`TensorSplit`: the layers of a module, split over the axis tp of a mesh by a plan."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..fsdp.root import root_of
from .verify import check_buffers

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from ...protocols import StepFunction
    from ..fsdp.root import ShardedRoot
    from .tensor import TensorPlan

logger = logging.getLogger(__name__)

# Any in this file: a plan of the user, of any form. Tensor parallelism is imported where it is used.


class TensorSplit:
    """How the matrices of layers are split.

    Args:
        plan: See `MeshStrategy`.
        sequence_parallel: See there.
        loss_parallel: See there.
    """

    def __init__(self, plan: Any, *, sequence_parallel: bool, loss_parallel: bool) -> None:
        self.plan = plan
        self.loss_parallel = loss_parallel
        self._in_parts = {"sequence_parallel": sequence_parallel, "loss_parallel": loss_parallel}
        self._resolved: TensorPlan | None = None  # of the module that is being sharded

    def check(self, module: nn.Module, size: int) -> None:
        """Refuse a module that the plan cannot split over this number of ranks. Does not communicate."""
        from .tensor.plan import check_plan

        check_plan(module, self.plan, tp=size, **self._in_parts)

    def begin(self, module: nn.Module, mesh: DeviceMesh, *, is_rank_zero: bool) -> Callable[[list[nn.Module]], None]:
        """Return what splits the layers of a unit over the ranks of the mesh."""
        from .tensor.apply import apply
        from .tensor.plan import resolve_plan

        plan = self._resolved = resolve_plan(module, self.plan, tp=mesh.size(), **self._in_parts)
        if is_rank_zero:
            logger.info("%s", plan)
            for note in plan.notes:
                logger.warning("%s", note)
        return lambda modules: apply(plan, modules, module, mesh)

    def finish(self, root: ShardedRoot) -> None:
        """Let the root know of its plan, if it has one, when all units are split."""
        root.tensor_plan, self._resolved = self._resolved, None
        if root.tensor_plan is not None:
            from .tensor.apply import finish

            finish(root.tensor_plan, root.module)

    def bind(
        self, step: StepFunction, module: nn.Module, name: str, verifies: Callable[[], bool] | None
    ) -> StepFunction:
        """Return what runs `module.<name>` with split layers; the step itself for a module that is not split.

        Args:
            step: Runs it otherwise.
            module: The user's module.
            name: Of its method.
            verifies: Asked in each step with gradients whether to compare the layers with full ones; None: never.
        """
        root = root_of(module)
        plan = None if root is None else root.tensor_plan
        if plan is None or name == "forward":
            return step
        from .tensor.apply import running
        from .tensor.verify import recording, verify_plan

        def run(*args: object, **kwargs: object) -> object:
            with running(plan, module):
                return step(*args, **kwargs)

        def run_verified(*args: object, **kwargs: object) -> object:
            if verifies is None or not (torch.is_grad_enabled() and verifies()):
                return run(*args, **kwargs)
            with recording(plan, module) as calls:
                output = run(*args, **kwargs)
            verify_plan(plan, module, calls)
            assert plan.mesh is not None, "the plan is applied"
            check_buffers(module, plan.mesh.get_group(), "tp")
            return output

        return run if verifies is None else run_verified

    def in_backward(self) -> AbstractContextManager[None]:
        """Return a context for backward passes from a loss, which may be one of parts of the vocabulary."""
        if not self.loss_parallel:
            return nullcontext()
        from .tensor.loss import losses_in_parts

        return losses_in_parts()
