"""`Stages`: the pipeline stages of a strategy, and the module that is trained on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ....errors import ConfigError
from ...distributed.shards import gather_full
from .blocks import plan_stages
from .options import Pipeline
from .setup import run_window, runner_of, split_module
from .shards import arrange_shards
from .state import gather_stages, runner_in

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from ....precision import Precision
    from ....protocols import StateDict, StepFunction
    from .window import PipelineRunner

__all__ = ["Stages"]

# Any in this file: batches, and what steps take and return.


class Stages:
    """Pipeline stages over the axis `pp`.

    Args:
        options: The arguments that the user chose; None: the defaults.
    """

    runner_of = staticmethod(runner_of)

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
        """Split a module into stages, in place; see `setup.split_module`."""
        _check_precision(precision)
        split_module(module, self.options, group, rank=rank, device=device, seeds_blocks=seeds_blocks)

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
        batches: Sequence[object],
        step: Callable[..., Any],
        share: Callable[[Any], Tensor],
        *,
        loss_parallel: bool,
        verifies: bool,
    ) -> Sequence[Any]:
        """Run forward and backward passes of a window's micro-batches through all stages; see `setup.run_window`."""
        assert self._runner is not None
        return run_window(self._runner, batches, step, share, loss_parallel=loss_parallel, verifies=verifies)

    # -- state ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> StateDict:
        """Return the shapes that stages exchange, with which a resumed run begins. On every rank: it communicates."""
        return {} if self._runner is None else {"pipeline": self._runner.state_dict()}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Load what `state_dict` returned, now or when the module is set up."""
        self._kept_shapes = state.get("pipeline")
        if self._runner is not None:
            self._runner.load_state_dict(self._kept_shapes)

    def gather(self, state: object, *, keep: bool) -> Any:
        """Return a state with full tensors of all stages; see `gather_stages`."""
        runner = runner_in(state)
        return gather_full(state, keep=keep) if runner is None else gather_stages(runner, state, keep=keep)

    def arrange_shards(self, state: object, mesh: DeviceMesh | None, *, keep: bool) -> Any:
        """Return a state under the names of all stages, with this rank's shards; see `shards.arrange_shards`."""
        runner = runner_in(state)
        return state if runner is None else arrange_shards(runner, state, mesh, keep=keep)


def _check_precision(precision: Precision) -> None:
    """Refuse a precision that scales the loss: a stage sees the gradients of its own parameters only."""
    if precision.has_scaler:
        raise ConfigError(
            f"Expected a precision without loss scaling with pipeline stages, got {precision.precision!r}.",
            fix="pass precision='bf16-mixed', 'bf16-true' or '32-true'.",
        )
