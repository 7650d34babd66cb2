"""What `prepare` makes of optimizers and schedules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.optim import Optimizer

from ...fabric import Fabric
from .operations import send_to_device
from .state import GradientState, PartialState

# Any in this file: state dicts, and attributes of classes of torch's or the user's.


class AcceleratedOptimizer(Optimizer):
    """An optimizer that steps, and clears gradients, only when gradients are synchronized.

    Args:
        optimizer: The user's optimizer.
        fabric: Steps it, with the precision and the strategy.
    """

    def __init__(self, optimizer: Optimizer, fabric: Fabric) -> None:
        if fabric.device.type != "cpu" and optimizer.state:
            optimizer.load_state_dict(send_to_device(optimizer.state_dict(), fabric.device))
        self.optimizer = optimizer
        self.inner = fabric.setup_optimizers(optimizer)
        self.gradient_state = GradientState()

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Step the optimizer if gradients are synchronized."""
        if self.gradient_state.sync_gradients:
            self.inner.step(closure)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear gradients if they are synchronized."""
        if self.gradient_state.sync_gradients:
            self.inner.zero_grad(set_to_none is None or set_to_none)

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was skipped because gradients overflowed."""
        return self.inner.has_stepped is False

    state = property(lambda self: self.optimizer.state)
    param_groups = property(lambda self: self.optimizer.param_groups)
    defaults = property(lambda self: self.optimizer.defaults)

    def state_dict(self) -> Any:
        """Return the optimizer's state."""
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        """Load a state of `state_dict`."""
        self.inner.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters."""
        self.optimizer.add_param_group(param_group)

    def train(self) -> None:
        """Call `train` of optimizers that have it."""
        getattr(self.optimizer, "train", lambda: None)()

    def eval(self) -> None:
        """Call `eval` of optimizers that have it."""
        getattr(self.optimizer, "eval", lambda: None)()

    def __getstate__(self) -> dict[str, Any]:
        return self.optimizer.__getstate__()

    def __repr__(self) -> str:
        return repr(self.optimizer)


class AcceleratedScheduler:
    """A schedule that steps `num_processes` times for each step of its optimizers, since a global batch has that size.

    It steps once with `split_batches`, not at all while gradients accumulate or if a step was skipped, and at each call
    with `step_with_optimizer=False`.

    Args:
        scheduler: The user's schedule.
        optimizers: The prepared optimizers.
        step_with_optimizer: Whether it depends on them.
        split_batches: Whether the loaders split batches.
    """

    def __init__(
        self,
        scheduler: Any,
        optimizers: AcceleratedOptimizer | Sequence[AcceleratedOptimizer],
        step_with_optimizer: bool = True,
        split_batches: bool = False,
    ) -> None:
        self.scheduler = scheduler
        self.optimizers = [optimizers] if isinstance(optimizers, AcceleratedOptimizer) else list(optimizers)
        self.split_batches = split_batches
        self.step_with_optimizer = step_with_optimizer
        self.gradient_state = GradientState()

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step the schedule."""
        if not self.step_with_optimizer:
            self.scheduler.step(*args, **kwargs)
            return
        if not self.gradient_state.sync_gradients or any(one.step_was_skipped for one in self.optimizers):
            return
        for _ in range(1 if self.split_batches else PartialState().num_processes):
            # OneCycleLR refuses steps after the last one, which a loader without drop_last causes.
            is_over = hasattr(self.scheduler, "total_steps") and not self.split_batches
            if not is_over or self.scheduler.last_epoch < self.scheduler.total_steps:
                self.scheduler.step(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Return what the schedule has: `state_dict`, `get_last_lr`, ..."""
        if name == "scheduler":
            raise AttributeError(name)
        return getattr(self.scheduler, name)
