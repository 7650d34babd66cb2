"""A module's `PipelineRunner`, and what its windows need where parameters are sharded besides."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from torch.distributed.fsdp import FSDPModule

from ...distributed.gradients import average_gradients
from ...fsdp.root import root_of
from ...fsdp.second_derivatives import end_backward
from .gradients import add_shared_gradients
from .split import split_stages
from .window import PipelineRunner

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.distributed import ProcessGroup

    from ...fsdp.root import ShardedRoot
    from .options import Pipeline

__all__ = ["run_window", "runner_of", "split_module"]

# Any in this file: batches, and what steps take and return.

_RUNNER = "_loopwright_pipeline"
"""Attribute of the user's module that holds its runner, beside its submodules: a later run continues with it."""


def runner_of(module: nn.Module) -> PipelineRunner | None:
    """Return what runs a module that is split into stages; None where it is not."""
    runner: PipelineRunner | None = module.__dict__.get(_RUNNER)
    return runner


def split_module(
    module: nn.Module,
    options: Pipeline,
    group: ProcessGroup,
    *,
    rank: int,
    device: torch.device,
    seeds_blocks: bool = True,
) -> None:
    """Split a module into stages, in place.

    Args:
        module: The user's module, the same on all ranks.
        options: The arguments that the user chose.
        group: The ranks of the pipeline.
        rank: This rank's place among them.
        device: Where this process computes.
        seeds_blocks: Whether what a step draws is the same on all stages, and blocks have generators of their own.

    Raises:
        ConfigError: A name in the options does not exist.
        ModuleError: The module cannot be split, or trains by manual optimization.
    """
    split = split_stages(module, options, rank=rank, num_ranks=group.size(), device=device)
    module.__dict__[_RUNNER] = PipelineRunner(split, options, group, device, seeds_blocks=seeds_blocks)


def run_window(
    runner: PipelineRunner,
    batches: Sequence[Any],
    step: Callable[..., Any],
    share: Callable[[Any], Tensor],
    *,
    loss_parallel: bool,
    verifies: bool,
) -> Sequence[Any]:
    """Run a window through all stages, and reduce its gradients; see `Strategy.run_window`.

    Args:
        runner: Has the stages.
        batches: See `Strategy.run_window`.
        step: See there.
        share: See there.
        loss_parallel: Whether the cross entropy is computed on parts of the vocabulary.
        verifies: Whether the first micro-batch is compared with the unsplit model.
    """
    root = root_of(runner.split.module)
    assert root is not None
    with _reducing_once(root), _losses_in_parts() if loss_parallel else nullcontext():
        losses = runner.run_window(batches, step, share, verifies=verifies)
    runner.unreached.settle(runner.group, root.group)
    add_shared_gradients(runner.split, runner.group)
    return losses


def _losses_in_parts() -> AbstractContextManager[None]:
    from ..tensor.loss import losses_in_parts  # tensor parallelism is loaded where it is used

    return losses_in_parts()


@contextmanager
def _reducing_once(root: ShardedRoot) -> Iterator[None]:
    """Return a context in which gradients are summed on this rank; at its end they are averaged and sharded.

    Parameters stay gathered within it: forward and backward passes of several micro-batches alternate.
    """
    units: Any = root  # Any: torch makes it an FSDPModule
    if not isinstance(root, FSDPModule):
        yield
        return
    _set(units, is_last=False)
    try:
        yield
    finally:
        _set(units, is_last=True)
    # As torch's pipeline stages do: no hook of a backward pass knows that it is the last one.
    end_backward(units._get_fsdp_state())
    if root.unused is not None:
        root.unused.settle()
    average_gradients(root.replicated, root.group)


def _set(units: Any, *, is_last: bool) -> None:
    units.set_is_last_backward(is_last)
    units.set_reshard_after_backward(is_last)
    units.set_requires_gradient_sync(is_last)
