"""Callables that run the user's steps on a module whose parameters are sharded."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...errors import ModuleError
from ..ddp.replica import ReplicaCall, loss_tensor
from ..distributed.gradients import LostGradients
from ..distributed.shards import FULL_STATE, is_sharded
from .root import STORAGE_OF, ShardedRoot, reshard

if TYPE_CHECKING:
    from ...protocols import StepFunction, StepOutput
    from ..parallel import ParallelStrategy

# Any in this file: what the user's steps take and return.


def bound_training(
    root: ShardedRoot, step: StepFunction, strategy: ParallelStrategy, adopt_changes: Callable[[ShardedRoot], None]
) -> StepFunction:
    """Return a function that runs a training step in the forward of the root and returns the step's output."""
    call = ReplicaCall(step, is_training=True)
    root.is_trained_by_step = strategy.world_size > 1
    has_run = False

    def run(*args: object, **kwargs: object) -> object:
        nonlocal has_run
        # One pass in C: nothing is called when `parameter.data` is assigned.
        if root.changes.is_set or [*map(STORAGE_OF, root.shards)] != root.storages:
            adopt_changes(root)
        if root.unfilled:
            root.check_values()
        try:
            if has_run or any(one._compiled_call_impl is not None for one in root.modules()):
                output = root.take_output(root(call, *args, **kwargs))
            else:  # not where modules are compiled: later steps, without the mode, would compile them again
                with LostGradients(_lost, of=is_sharded):
                    output = root.take_output(root(call, *args, **kwargs))
            has_run = True
        except RuntimeError as error:
            explain(error)
            raise
        if output.__class__ is not Tensor and strategy.world_size > 1 and torch.is_grad_enabled():
            _check_loss(output, type(strategy).__name__)
        return output

    return run


def _check_loss(output: StepOutput, strategy: str) -> None:
    loss = loss_tensor(output)
    if loss is None or not loss.requires_grad:
        raise ModuleError(
            f"Expected a loss with a graph from training_step, which {strategy} needs on every rank, got "
            f"{'None' if loss is None else 'a loss without a graph'}.",
            fix="to skip a batch, return the loss times 0 or lw.Loss(loss_sum * 0, weight=0), or train with "
            "strategy='ddp', where None skips a batch.",
        )


def bound(
    root: ShardedRoot, step: StepFunction, strategy: ParallelStrategy, adopt_changes: Callable[[ShardedRoot], None]
) -> StepFunction:
    """Return what runs any other step, or the forward; a pass without gradients leaves no parameter gathered."""
    call = ReplicaCall(step, is_training=False)
    has_order = False

    def run(*args: object, **kwargs: object) -> object:
        nonlocal has_order
        if root.changes.is_set or [*map(STORAGE_OF, root.shards)] != root.storages:
            if torch.is_grad_enabled():
                adopt_changes(root)
            else:  # ranks may have unequally many batches to evaluate: nothing is communicated here
                root.check_shards(strategy.global_rank)
        if root.unfilled:
            root.check_values()
        is_recorded = has_order or torch.is_grad_enabled()
        try:
            with nullcontext() if is_recorded else root.recording():
                output = step(*args, **kwargs) if root.is_by_parts else root(call, *args, **kwargs)
        except RuntimeError as error:
            explain(error)
            raise
        if not torch.is_grad_enabled():
            has_order = True
            reshard(root)
        return output

    return run


def explain(error: RuntimeError, loss: Tensor | None = None, roots: Iterable[ShardedRoot] = ()) -> None:
    """Add the cause to an error of torch, where a parameter was read or saved as a DTensor; once.

    Args:
        error: Any.
        loss: Whose backward pass failed.
        roots: Have the parameters, which are named if the loss depends on them as DTensors.
    """
    if "invalid python storage" in str(error):  # safetensors, which save_pretrained() writes
        error.add_note(f"This rank has parts of the tensors (DTensors), which cannot be saved. Call {FULL_STATE}.")
    if "not have been used in the graph" in str(error):
        error.add_note(f"It may be a parameter of a unit. {_lost()}")
    if not any(text in str(error) for text in ("mixed torch.Tensor and DTensor", "inputs with different meshes")):
        return
    if _READ_OUTSIDE in getattr(error, "__notes__", ()):
        return
    names = [] if loss is None else _read_in(loss, roots)
    if names:
        error.add_note(f"The loss depends on the DTensors {', '.join(names[:5])}{' ...' if len(names) > 5 else ''}.")
    error.add_note(_READ_OUTSIDE)


def _read_in(loss: Tensor, roots: Iterable[ShardedRoot]) -> list[str]:
    """Return the names of sharded parameters on which a loss depends."""
    found: set[int] = set()
    seen, nodes = set(), [loss.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen or type(node).__name__ == "_ToTorchTensorBackward":  # a layer reads it
            continue
        seen.add(node)
        if is_sharded(variable := getattr(node, "variable", None)):
            found.add(id(variable))
        nodes += [one for one, _ in node.next_functions]
    return [name for root in roots for name, one in root.named_shards() if id(one) in found]


_READ_OUTSIDE = (
    "A parameter was read outside of the forward of its unit, where each rank has a part of it (a DTensor). Take "
    "parameter.full_tensor() in its place, on every rank; or read it in the forward of its unit; or let "
    "auto_wrap_policy= leave it outside of all units. In a hook or callback, call the module, a layer of it, or "
    "trainer.model(...), on every rank: they gather what they need."
)


def _lost() -> ModuleError:
    return ModuleError(
        "Expected a step without gradients of sharded parameters (torch.autograd.grad), got one: the forward of a unit "
        "computes with gathered copies of them.",
        fix="train with ddp or tp, or let auto_wrap_policy= leave these parameters outside of all units. Gradients of "
        "inputs are right.",
    )
