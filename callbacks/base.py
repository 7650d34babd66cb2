"""`Callback`, the base class of callbacks, with every hook; and `Checkpoint`, the base of those that save."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from ..protocols import StepFunction, Tree

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from ..protocols import AnyBatch, AnyOutput, StateDict
    from ..trainer import Trainer

R = TypeVar("R")
AnyModule: TypeAlias = Any  # lw.Module or any nn.Module that trains; Any, so that a subclass may narrow it


class Callback:
    """Take part in a run without changing the module: override the hooks of interest.

    With several ranks, a decision that depends on a file, a clock or a metric of one rank must be made on rank 0 and
    broadcast (`trainer.strategy.broadcast`). A hook that communicates must do so on every rank.

    Hooks run on every rank, in the order in which callbacks were given to the Trainer, before the module's hook of the
    same name. What they return is ignored. A hook that is not overridden costs nothing.

    A subclass may define two more methods. `forget_run()` resets what belongs to the run of another Trainer (counts,
    scores, averages); it is called at the beginning of a fit if the last one belonged to another Trainer, as in k-fold
    training with one callback. `restore_param_groups(trainer, pl_module)` adds the parameter groups that were added
    during the run which is resumed; it is called before the optimizers get their states back.

    Attributes:
        replaces_weights: Whether the callback temporarily replaces the module's weights (EMA). Its `on_save_checkpoint`
            then puts the trained weights into every checkpoint, including those with weights only.
        runs_first: Whether the callback comes before all others, because they depend on what it sets (batch size,
            learning rate).
        changes_weights: Whether `on_train_epoch_end` of this built-in callback changes weights. For other callbacks
            the Trainer compares the weights.
        runs_last: Whether the hooks run after those of the module, of metrics and of loggers, at every event.
        hears_every_step: Whether `on_train_batch_end` is also called on a rank without a batch, with None for outputs
            and batch. Otherwise such a rank skips the hook.
        stop_reason: Why the callback set `trainer.should_stop`, for the line with which `fit` ends; None otherwise.
    """

    runs_first: bool = False
    runs_last: bool = False
    hears_every_step: bool = False
    replaces_weights: bool = False
    changes_weights: bool = False
    stop_reason: str | None = None

    @property
    def state_key(self) -> str:
        """Name of this callback's state in a checkpoint; two callbacks with state need different names."""
        return type(self).__qualname__

    def _generate_state_key(self, **kwargs: object) -> str:  # constructor arguments
        """Return a key made of the class name and of the arguments that distinguish instances."""
        return f"{type(self).__qualname__}{kwargs!r}"

    def state_dict(self) -> StateDict:
        """Return the state to save: tensors, plain values, and containers of these. Empty: nothing is saved."""
        return {}

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Restore what `state_dict` returned. Called after `setup`, before the optimizers exist."""

    def setup(self, trainer: Trainer, pl_module: AnyModule, stage: str) -> None:
        """At the beginning of a run; `stage` is "fit", "validate", "test" or "predict"."""

    def teardown(self, trainer: Trainer, pl_module: AnyModule, stage: str) -> None:
        """At the end of a run that succeeded; after a failure `on_exception` is called instead."""

    def on_fit_start(self, trainer: Trainer, pl_module: AnyModule) -> None:
        """Model and optimizers are built, on their device, and resumed; nothing has run yet."""

    def on_fit_end(self, trainer: Trainer, pl_module: AnyModule) -> None:
        """After training, after `on_train_end`."""

    def on_sanity_check_start(self, trainer: Trainer, pl_module: AnyModule) -> None:
        """Before the trial validation at the beginning of fit."""

    def on_sanity_check_end(self, trainer: Trainer, pl_module: AnyModule) -> None:
        """After the trial validation at the beginning of fit."""

    def on_train_start(self, trainer: Trainer, pl_module: AnyModule) -> None:
        """Before the first epoch of this run."""

    def on_train_end(self, trainer: Trainer, pl_module: AnyModule) -> None:
        """After the last epoch of this run."""

    def on_train_epoch_start(self, trainer: Trainer, pl_module: AnyModule) -> None:
        """At the beginning of an epoch; not again when a run resumes inside it."""

    def on_train_epoch_end(self, trainer: Trainer, pl_module: AnyModule) -> None:
        """After the last batch of an epoch and after the validation that was due there."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: AnyModule, batch: AnyBatch, batch_idx: int) -> None:
        """Before a micro-batch; it is on the device."""

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: AnyModule, outputs: AnyOutput, batch: AnyBatch, batch_idx: int
    ) -> None:
        """After a micro-batch; after the last of a window the optimizer has stepped and counters are advanced."""

    def on_validation_start(self, trainer: Trainer, pl_module: AnyModule) -> None:
        """Before a validation, inside fit or by itself."""

    def on_validation_end(self, trainer: Trainer, pl_module: AnyModule) -> None:
        """After a validation; its metrics are final."""

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: AnyModule) -> None:
        """Before the first loader of a validation."""

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: AnyModule) -> None:
        """After the last batch of a validation."""

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: AnyModule, batch: AnyBatch, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Before a batch of a validation."""

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: AnyModule,
        outputs: AnyOutput,
        batch: AnyBatch,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """After a batch of a validation."""

    def on_test_start(self, trainer: Trainer, pl_module: AnyModule) -> None:
        """Before a test."""

    def on_test_end(self, trainer: Trainer, pl_module: AnyModule) -> None:
        """After a test; its metrics are final."""

    def on_test_epoch_start(self, trainer: Trainer, pl_module: AnyModule) -> None:
        """Before the first loader of a test."""

    def on_test_epoch_end(self, trainer: Trainer, pl_module: AnyModule) -> None:
        """After the last batch of a test."""

    def on_test_batch_start(
        self, trainer: Trainer, pl_module: AnyModule, batch: AnyBatch, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Before a batch of a test."""

    def on_test_batch_end(
        self,
        trainer: Trainer,
        pl_module: AnyModule,
        outputs: AnyOutput,
        batch: AnyBatch,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """After a batch of a test."""

    def on_predict_start(self, trainer: Trainer, pl_module: AnyModule) -> None:
        """Before a prediction."""

    def on_predict_end(self, trainer: Trainer, pl_module: AnyModule) -> None:
        """After a prediction."""

    def on_predict_epoch_start(self, trainer: Trainer, pl_module: AnyModule) -> None:
        """Before the first loader of a prediction."""

    def on_predict_epoch_end(self, trainer: Trainer, pl_module: AnyModule) -> None:
        """After the last batch of a prediction."""

    def on_predict_batch_start(
        self, trainer: Trainer, pl_module: AnyModule, batch: AnyBatch, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Before a batch of a prediction."""

    def on_predict_batch_end(
        self,
        trainer: Trainer,
        pl_module: AnyModule,
        outputs: AnyOutput,
        batch: AnyBatch,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """After a batch of a prediction; `outputs` is what `predict_step` returned."""

    def on_before_zero_grad(self, trainer: Trainer, pl_module: AnyModule, optimizer: Optimizer) -> None:
        """Before gradients are set to zero, once per window."""

    def on_before_backward(self, trainer: Trainer, pl_module: AnyModule, loss: Tensor) -> None:
        """Before a backward; `loss` is what it starts from, on the device."""

    def on_after_backward(self, trainer: Trainer, pl_module: AnyModule) -> None:
        """After a backward; gradients are sums over the window so far and may still carry a loss scale."""

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: AnyModule, optimizer: Optimizer) -> None:
        """Before clipping and the optimizer's step; gradients are those of the full window, unscaled."""

    def on_exception(self, trainer: Trainer, pl_module: AnyModule, exception: BaseException) -> None:
        """When a run fails or is interrupted; the exception is raised again afterwards."""

    def on_save_checkpoint(self, trainer: Trainer, pl_module: AnyModule, checkpoint: StateDict) -> None:
        """While a checkpoint is collected; it may be changed in place."""

    def on_load_checkpoint(self, trainer: Trainer, pl_module: AnyModule, checkpoint: StateDict) -> None:
        """Before the callbacks' states are restored from a checkpoint."""


def as_hook(method: StepFunction, *first: str) -> StepFunction:
    """Return a hook that calls a method with these arguments first: one method can serve several hooks."""

    def hook(self: Callback, *arguments: Any, **named: Any) -> None:
        method(self, *first, *arguments, **named)

    hook.__doc__ = method.__doc__
    return hook


def from_rank_zero(trainer: Trainer, decide: Callable[[], R]) -> R:
    """Return what the function returns on rank 0, on every rank; an error of rank 0 is raised on every rank.

    For decisions that depend on files, clocks or random numbers. It communicates: call it on every rank at the same
    place. With one process, and on a rank that is alone after an error, the function is called directly.
    """
    if not trainer.ranks_answer:
        return decide()
    from .rank_zero import decided_on_rank_zero  # not imported where there is one process

    return decided_on_rank_zero(trainer.strategy, decide)


class Checkpoint(Callback):
    """Write checkpoints. Its hooks run after everything else at an event: module, metrics, loggers, other callbacks."""

    runs_last = True
    hears_every_step = True  # writing a checkpoint takes all ranks


def find_state(states: Iterable[str], key: str) -> str | None:
    """Return the key in a checkpoint's states that names the same arguments: by value, so that 1 is 1.0.

    Args:
        states: The state keys in a checkpoint.
        key: `state_key` of the callback; its own key is preferred.
    """
    if key in states:
        return key
    wanted = _arguments_in(key)
    same = [one for one in states if wanted is not None and _arguments_in(one) == wanted]
    return same[0] if len(same) == 1 else None


def _arguments_in(key: str) -> tuple[str, Tree] | None:
    """Return the name and the arguments of a key; None if it has none, or they are not plain values."""
    name, brace, text = key.partition("{")
    try:
        return (name, _without_tuples(ast.literal_eval(brace + text))) if brace else None
    except (ValueError, SyntaxError):
        return None


def _without_tuples(value: Tree) -> Tree:  # a file has lists in their place
    if isinstance(value, dict):
        return {key: _without_tuples(inner) for key, inner in value.items()}
    return [_without_tuples(inner) for inner in value] if isinstance(value, list | tuple) else value
