"""`Stages`: the pipeline stages of a strategy, and the module that is trained on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

from torch.distributed.fsdp import FSDPModule

from ....errors import ConfigError
from ...distributed.gradients import average_gradients
from ...distributed.shards import gather_full
from ...fsdp.root import root_of
from ...fsdp.second_derivatives import end_backward
from .blocks import plan_stages
from .gradients import add_shared_gradients
from .options import Pipeline
from .split import split_stages
from .state import arrange_shards, gather_stages, runner_in
from .window import PipelineRunner

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from ....precision import Precision
    from ....protocols import Batch, StateDict, StepFunction, T
    from ...fsdp.root import ShardedRoot

# Any in this file: batches, and what steps take and return.

_RUNNER = "_loopwright_pipeline"
"""Attribute of the user's module that holds its runner, beside its submodules: a later run continues with it."""


def runner_of(module: nn.Module) -> PipelineRunner | None:
    """Return what runs a module that is split into stages; None where it is not."""
    runner: PipelineRunner | None = module.__dict__.get(_RUNNER)
    return runner


class Stages:
    """Pipeline stages over the axis `pp`.

    Args:
        options: The arguments that the user chose; None: the defaults.
    """

    def __init__(self, options: Pipeline | None) -> None:
        self.options = Pipeline() if options is None else options
        self._runner: PipelineRunner | None = None  # of the module that is trained
        self._kept_shapes: object = None  # of a checkpoint

    def check(self, module: nn.Module, num_ranks: int, precision: Precision) -> None:
        """Refuse a module or a precision that cannot be trained in stages. Does not communicate."""
        _check_precision(precision)
        plan_stages(module, self.options, num_ranks)

    def split(
        self,
        module: nn.Module,
        group: ProcessGroup,
        *,
        rank: int,
        device: torch.device,
        precision: Precision,
        seeds_blocks: bool,
    ) -> None:
        """Split a module into stages, in place.

        Args:
            module: The user's module, the same on all ranks.
            group: The ranks of the pipeline.
            rank: This rank's place among them.
            device: Where this process computes.
            precision: Of the run.
            seeds_blocks: Whether what a step draws is the same on all stages, and blocks have separate generators.

        Raises:
            ConfigError: A name in the options does not exist, or the precision scales the loss.
            ModuleError: The module cannot be split, or trains by manual optimization.
        """
        _check_precision(precision)
        split = split_stages(module, self.options, rank=rank, num_ranks=group.size(), device=device)
        module.__dict__[_RUNNER] = PipelineRunner(split, self.options, group, device, seeds_blocks=seeds_blocks)

    def last_rank(self, num_ranks: int) -> int:
        """Return the place in the pipeline of the rank with the last stage."""
        last = self.options.num_stages(num_ranks) - 1
        return next(rank for rank in range(num_ranks) if last in self.options.stages_of(rank, num_ranks))

    def bind(self, step: StepFunction, module: nn.Module, name: str) -> StepFunction:
        """Return what runs `module.<name>` through the stages; the step itself for a module that is not split."""
        runner = runner_of(module)
        if runner is None:
            return step
        if name != "training_step":
            return runner.evaluated(step)
        self._runner = runner
        runner.load_state_dict(self._kept_shapes)
        return runner.staged(step)

    def run_window(
        self,
        batches: Sequence[Batch],
        step: StepFunction,
        share: Callable[[Any], Tensor],
        *,
        in_backward: AbstractContextManager[object],
        verifies: bool,
    ) -> Sequence[Any]:
        """Run a window through all stages, and reduce its gradients.

        Args:
            batches: See `RunsWindows.run_window`.
            step: See there.
            share: See there.
            in_backward: A context for backward passes, which are among the forward passes.
            verifies: Whether the first micro-batch is compared with the unsplit model.
        """
        assert self._runner is not None
        runner, root = self._runner, root_of(self._runner.split.module)
        assert root is not None
        with in_backward, _reducing_once(root):
            losses = runner.run_window(batches, step, share, verifies=verifies)
        runner.unreached.settle(runner.group, root.group)
        add_shared_gradients(runner.split, runner.group)
        return losses

    # -- state ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> StateDict:
        """Return the shapes that stages exchange, with which a resumed run begins. On every rank: it communicates."""
        return {} if self._runner is None else {"pipeline": self._runner.state_dict()}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Load what `state_dict` returned, now or when the module is set up."""
        self._kept_shapes = state.get("pipeline")
        if self._runner is not None:
            self._runner.load_state_dict(self._kept_shapes)

    def gather(self, state: T, *, keep: bool) -> T:
        """Return a state with full tensors of all stages; see `gather_stages`."""
        runner = runner_in(state)
        return gather_full(state, keep=keep) if runner is None else gather_stages(runner, state, keep=keep)

    def arrange_shards(self, state: T, mesh: DeviceMesh | None, *, keep: bool) -> T:
        """Return a state under the names of all stages, with this rank's shards; see `state.arrange_shards`."""
        runner = runner_in(state)
        return state if runner is None else arrange_shards(runner, state, mesh, keep=keep)


def _check_precision(precision: Precision) -> None:
    """Refuse a precision that scales the loss: a stage sees the gradients of its own parameters only."""
    if precision.has_scaler:
        raise ConfigError(
            f"Expected a precision without loss scaling with pipeline stages, got {precision.precision!r}.",
            fix="pass precision='bf16-mixed', 'bf16-true' or '32-true'.",
        )


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
