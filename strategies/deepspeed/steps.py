"""The steps of a module under the hooks of its DeepSpeed engine."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ...errors import ModuleError
from ...protocols import StepOutput
from ..ddp.replica import ReplicaCall, loss_tensor
from .engine import EngineRoot

if TYPE_CHECKING:
    from .strategy import DeepSpeedStrategy

Step = Callable[..., StepOutput]
_NORMS_ON_CPU = (
    "A norm got a float32 input for its 16-bit weights, which autocast casts on a GPU, but not on the CPU. To fix it: "
    "pass precision='bf16-true' or '32-true' on the CPU, or strategy='ddp' or 'fsdp'."
)


def bind_step(strategy: DeepSpeedStrategy, module: nn.Module, name: str) -> Step:
    """Return a function that runs `module.<name>`, on every rank at the same time; see `Strategy.bind_step`."""
    original = strategy.unwrap(module)
    step: Step = original if name == "forward" else getattr(original, name)
    if strategy.precision.policy.compute_dtype is not torch.float32:
        step = _within(strategy.precision.step_context, step)
    if not isinstance(module, EngineRoot):
        return step
    return _bind(strategy, module, step, is_training=name == "training_step" and not module.is_manual)


def _bind(strategy: DeepSpeedStrategy, root: EngineRoot, step: Step, *, is_training: bool) -> Step:
    call, reference = ReplicaCall(step, is_training=is_training), weakref.ref(root)

    def evaluate(*args: object, **kwargs: object) -> StepOutput:
        if strategy.stage < 3:
            output = step(*args, **kwargs)
        else:
            output = (root.run if strategy.world_size == 1 else root.evaluate)(call, args, kwargs)
        if strategy.keeps_activations:  # until a backward pass, which does not come
            from deepspeed import checkpointing

            checkpointing.reset()
        return output

    def run(*args: object, **kwargs: object) -> StepOutput:
        if not torch.is_grad_enabled():
            return evaluate(*args, **kwargs)
        if root.changes.is_set:
            _refuse_changes(strategy, root)
        strategy.last_root = reference
        output = root.run(call, args, kwargs)
        if is_training and output.__class__ is not Tensor:
            _check_loss(strategy, output)
        return output

    return run


def _refuse_changes(strategy: DeepSpeedStrategy, root: EngineRoot) -> None:
    """Refuse parameters that were added to the module since its engine was made."""
    new = [*root.changes.new_parameters(root.module)]
    if new:
        raise ModuleError(
            f"Expected the parameters of {type(root.module).__name__} as they were when its DeepSpeed engine was made, "
            f"got new ones on rank {strategy.global_rank}: {', '.join(new[:5])}{' ...' if len(new) > 5 else ''}.",
            fix="create all parameters before fit, or in configure_model; freeze those that are trained later with "
            "requires_grad=False; or train with strategy='ddp' or 'fsdp', which take in new layers.",
        )
    root.changes.settle(root.module)


def _check_loss(strategy: DeepSpeedStrategy, output: StepOutput) -> None:
    loss = loss_tensor(output)
    has_no_pass = strategy.world_size > 1 if loss is None else not loss.requires_grad
    if has_no_pass:
        raise ModuleError(
            "Expected a loss with a graph from training_step, which DeepSpeed needs on every rank, got "
            f"{'None' if loss is None else 'a loss without a graph'}.",
            fix="to skip a batch, return the loss times 0 or lw.Loss(loss_sum * 0, weight=0), or train with "
            "strategy='ddp', where None skips a batch.",
        )


def _within(context: Callable[[], AbstractContextManager[object]], step: Step) -> Step:
    def run(*args: object, **kwargs: object) -> StepOutput:
        with context():
            try:
                return step(*args, **kwargs)
            except RuntimeError as error:
                if "mixed dtype (CPU)" in str(error):
                    error.add_note(_NORMS_ON_CPU)
                raise

    return run
