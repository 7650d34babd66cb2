"""`ManagedOptimizer`: the optimizer that `self.optimizers()` and `optimizer_step` pass to a module.

Its `step` goes through precision and strategy, calls on_before_optimizer_step in manual optimization, and counts as a
training step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any, Protocol

from torch.optim import Optimizer

from ...errors import ModuleError
from ...protocols import Closure

if TYPE_CHECKING:
    from torch import nn

    from ...fabric import Fabric
    from ...strategies import Strategy


class OptimizerOwner(Protocol):
    """The owner of managed optimizers: a Trainer."""

    fabric: Fabric

    @property
    def strategy(self) -> Strategy:
        """The strategy."""

    @property
    def model(self) -> nn.Module | None:
        """The module as the strategy set it up."""

    def _lw_toggle(self, optimizer: Optimizer | ManagedOptimizer) -> None:
        """Let only this optimizer's parameters require gradients."""

    def _lw_untoggle(self, optimizer: Optimizer | ManagedOptimizer) -> None:
        """Undo `_lw_toggle`."""


class ManagedOptimizer:
    """An optimizer whose `step` is the Trainer's. Everything else is the wrapped optimizer's.

    `isinstance(managed, torch.optim.Adam)` is true for a wrapped Adam, so that schedules accept it.

    Attributes:
        optimizer: The wrapped optimizer.
        num_steps: Number of its steps since the run began.
        take_step: Function that steps the wrapped optimizer, with or without a closure; None outside of a run.
        may_be_joint: Whether several step after one loss in automatic optimization.
    """

    may_be_joint = True

    def __init__(
        self,
        optimizer: Optimizer,
        trainer: OptimizerOwner | None = None,
        take_step: Callable[[Optimizer, Closure | None], bool] | None = None,
    ) -> None:
        self.optimizer = optimizer
        self.num_steps = 0
        self._trainer = trainer
        self.take_step = take_step

    @property  # type: ignore[misc]  # typeshed's __class__ can be assigned; isinstance() asks this one
    def __class__(self) -> Any:  # Any: the optimizer's
        return type(self.optimizer)

    def __getattr__(self, name: str) -> Any:  # Any: an attribute of the optimizer
        if name in ("optimizer", "_trainer", "take_step"):
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def step(self, closure: Closure | None = None, **kwargs: object) -> Any:  # Any: the closure's
        """Step the optimizer through precision and strategy.

        Args:
            closure: Function that evaluates the model and returns the loss; the optimizer may call it several times.
            kwargs: Further arguments of the optimizer's `step`.

        Returns:
            The result of the optimizer's `step` if its class is not torch's; else the closure's loss, or None without a
            closure.

        Raises:
            ModuleError: The closure is not callable.
        """
        if closure is not None and not callable(closure):
            raise ModuleError(
                f"optimizer.step got a closure of type {type(closure).__name__}.",
                fix="pass a function without arguments that returns the loss, or nothing.",
            )
        take_step = self.take_step
        if take_step is None:
            raise ModuleError(
                f"{self!r} was made outside of a run, so that it cannot step.",
                fix="step the optimizers that self.optimizers() returns, or the optimizer itself.",
            )
        loss: list[object] = []

        def evaluate() -> object:
            assert closure is not None
            loss.append(closure())
            return loss[-1]

        results: list[object] = []
        with self._observed(kwargs, results):
            if take_step(self.optimizer, evaluate if closure is not None else None):
                self.num_steps += 1
        if results and results[-1] is not None:
            return results[-1]
        return loss[0] if loss else None

    @contextmanager
    def _observed(self, kwargs: dict[str, object], results: list[object]) -> Iterator[None]:
        """Pass these arguments to the optimizer's `step`, and keep what it returns; not for an optimizer of torch.

        An engine's optimizer takes no arguments: its step is the engine's.
        """
        optimizer = self.optimizer
        is_of_engine = self._trainer is not None and self._trainer.strategy.traits.owns_optimizers
        if is_of_engine or (not kwargs and type(optimizer).step.__module__.startswith("torch.")):
            yield
            return
        step = optimizer.step

        @wraps(step)
        def observed(*args: Any, **others: Any) -> object:
            results.append(step(*args, **{**kwargs, **others}))
            return results[-1]

        own = optimizer.__dict__.get("step")  # a schedule that counts steps has put one there
        optimizer.step = observed  # type: ignore[assignment]
        try:
            yield
        finally:
            if own is None:
                del optimizer.__dict__["step"]
            else:
                optimizer.step = own  # type: ignore[method-assign]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients, including gradients that were not reduced over ranks."""
        self.optimizer.zero_grad(set_to_none)
        strategy = None if self._trainer is None else self._trainer.strategy
        if strategy is not None and strategy.traits.shards_parameters:
            strategy.discard_gradients(None, self.optimizer)

    @contextmanager
    def toggle_model(self, sync_grad: bool = True) -> Iterator[None]:
        """Disable gradients of the other optimizers' parameters within a `with` block.

        Args:
            sync_grad: Whether gradients are reduced over ranks; False is for manual accumulation.
        """
        trainer = self._trainer
        assert trainer is not None
        fabric, model = trainer.fabric, trainer.model
        assert model is not None
        with toggled(trainer, self), fabric.no_backward_sync(model, enabled=not sync_grad):
            yield

    def __repr__(self) -> str:
        return f"ManagedOptimizer({self.optimizer!r})"


@contextmanager
def toggled(trainer: OptimizerOwner, optimizer: Optimizer | ManagedOptimizer) -> Iterator[None]:
    """Disable gradients of the other optimizers' parameters within a `with` block."""
    trainer._lw_toggle(optimizer)
    try:
        yield
    finally:
        trainer._lw_untoggle(optimizer)
