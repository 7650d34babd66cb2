"""`Stages`: the pipeline stages of a strategy, and the module that is trained on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ....errors import ConfigError
from .options import Pipeline
from .setup import run_window, runner_of

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ....precision import Precision
    from ....protocols import StateDict, StepFunction
    from .window import PipelineRunner

__all__ = ["Stages", "check_precision"]

# Any in this file: batches, and what steps take and return.


class Stages:
    """Pipeline stages over the axis `pp`. Where it has one process, there is no runner and nothing happens.

    Args:
        options: The arguments that the user chose; None: the defaults.
    """

    def __init__(self, options: Pipeline | None) -> None:
        self.options = Pipeline() if options is None else options
        self._runner: PipelineRunner | None = None  # of the module that is trained
        self._kept_shapes: object = None  # of a checkpoint

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

    def add_state(self, state: StateDict) -> StateDict:
        """Return a strategy's state with the shapes that stages exchange. On every rank: it communicates."""
        return state if self._runner is None else {**state, "pipeline": self._runner.state_dict()}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Load what `add_state` added, now or when the module is set up."""
        self._kept_shapes = state.get("pipeline")
        if self._runner is not None:
            self._runner.load_state_dict(self._kept_shapes)


def check_precision(precision: Precision) -> None:
    """Refuse a precision that scales the loss: a stage sees the gradients of its own parameters only."""
    if precision.has_scaler:
        raise ConfigError(
            f"Expected a precision without loss scaling with pipeline stages, got {precision.precision!r}.",
            fix="pass precision='bf16-mixed', 'bf16-true' or '32-true'.",
        )
