"""`Callback`, the base class of callbacks, with every hook; and `Checkpoint`, the base of those that save."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from ..errors import ChecksKeywords
from ..protocols import StepFunction, Tree

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from ..protocols import AnyBatch, AnyOutput, StateDict
    from ..trainer import Trainer

R = TypeVar("R")
AnyModule: TypeAlias = Any  # lw.Module or any nn.Module that trains; Any, so that a subclass may narrow it


class Callback(ChecksKeywords):
    """Take part in a run without changing the module: override the hooks of interest.

    With several ranks, a decision that depends on a file, a clock or a metric of one rank must be made on rank 0 and
    broadcast (`trainer.strategy.broadcast`). A hook that communicates must do so on every rank.

    Hooks run on every rank, in the order in which callbacks were passed to the Trainer, before the module's hook of the
    same name. Their return values are ignored. A hook that is not overridden costs nothing.

    A subclass may define two more methods. `forget_run()` resets the state of another Trainer's run (counts, scores,
    averages). It is called at the beginning of a fit if the last one belonged to another Trainer, as in k-fold training
    with one callback. `restore_param_groups(trainer, pl_module)` adds the parameter groups that the resumed run had
    added during training. It is called before the optimizers' states are restored.

    Attributes:
        replaces_weights: Whether the callback temporarily replaces the module's weights (EMA). Its `on_save_checkpoint`
            then puts the trained weights into every checkpoint, including those with weights only.
        runs_first: Whether the callback runs before all others, because they depend on a value that it sets (batch
            size, learning rate).
        changes_weights: Whether `on_train_epoch_end` of this built-in callback changes weights. For other callbacks
            the Trainer compares the weights.
        runs_last: Whether each hook runs after the module's hook, metrics and loggers.
        hears_every_step: Whether `on_train_batch_end` is also called on a rank without a batch, with None for outputs
            and batch. Otherwise such a rank skips the hook.
        stop_reason: Reason why the callback set `trainer.should_stop`, logged when `fit` ends; None otherwise.
    """

    runs_first: bool = False
    runs_last: bool = False
    hears_every_step: bool = False
    replaces_weights: bool = False
    changes_weights: bool = False
    stop_reason: str | None = None

    @property
    def state_key(self) -> str:
        """Key of this callback's state in a checkpoint; two callbacks with state need different keys."""
        return type(self).__qualname__

    def _generate_state_key(self, **kwargs: object) -> str:  # constructor arguments
        """Return a key made of the class name and of the arguments that distinguish instances."""
        return f"{type(self).__qualname__}{kwargs!r}"

    def state_dict(self) -> StateDict:
        """Return the state to save: tensors, plain values, and containers of these. An empty dict saves nothing."""
        return {}

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Restore what `state_dict` returned. Called after `setup`, before the optimizers exist."""

    def setup(self, trainer: Trainer, pl_module: AnyModule, stage: str) -> None:
        """Called at the beginning of a run; `stage` is "fit", "validate", "test" or "predict"."""

    def teardown(self, trainer: Trainer, pl_module: AnyModule, stage: str) -> None:
        """Called at the end of a run that succeeds; after a failure, `on_exception` is called instead."""

    def on_fit_start(self, trainer: Trainer, pl_module: AnyModule) -> None:
        """Called when model and optimizers are built, on their device and resumed, before anything runs."""

    def on_fit_end(self, trainer: Trainer, pl_module: AnyModule) -> None:
        """Called after training, after `on_train_end`."""

    def on_sanity_check_start(self, trainer: Trainer, pl_module: AnyModule) -> None:
        """Called before the sanity check at the beginning of fit."""

    def on_sanity_check_end(self, trainer: Trainer, pl_module: AnyModule) -> None:
        """Called after the sanity check at the beginning of fit."""

    def on_train_start(self, trainer: Trainer, pl_module: AnyModule) -> None:
        """Called before the first epoch of this run."""

    def on_train_end(self, trainer: Trainer, pl_module: AnyModule) -> None:
        """Called after the last epoch of this run."""

    def on_train_epoch_start(self, trainer: Trainer, pl_module: AnyModule) -> None:
        """Called at the beginning of an epoch; not again when a run resumes within it."""

    def on_train_epoch_end(self, trainer: Trainer, pl_module: AnyModule) -> None:
        """Called after the last batch of an epoch, and after the validation that is due there."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: AnyModule, batch: AnyBatch, batch_idx: int) -> None:
        """Called before a micro-batch, which is on the device."""

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: AnyModule, outputs: AnyOutput, batch: AnyBatch, batch_idx: int
    ) -> None:
        """Called after a micro-batch; after a window's last one, optimizer step and counts are done."""

    def on_validation_start(self, trainer: Trainer, pl_module: AnyModule) -> None:
        """Called before a validation, inside fit or separate."""

    def on_validation_end(self, trainer: Trainer, pl_module: AnyModule) -> None:
        """Called after a validation; its metrics are final."""

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: AnyModule) -> None:
        """Called before the first loader of a validation."""

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: AnyModule) -> None:
        """Called after the last batch of a validation."""

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: AnyModule, batch: AnyBatch, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Called before a batch of a validation."""

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: AnyModule,
        outputs: AnyOutput,
        batch: AnyBatch,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Called after a batch of a validation."""

    def on_test_start(self, trainer: Trainer, pl_module: AnyModule) -> None:
        """Called before a test."""

    def on_test_end(self, trainer: Trainer, pl_module: AnyModule) -> None:
        """Called after a test; its metrics are final."""

    def on_test_epoch_start(self, trainer: Trainer, pl_module: AnyModule) -> None:
        """Called before the first loader of a test."""

    def on_test_epoch_end(self, trainer: Trainer, pl_module: AnyModule) -> None:
        """Called after the last batch of a test."""

    def on_test_batch_start(
        self, trainer: Trainer, pl_module: AnyModule, batch: AnyBatch, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Called before a batch of a test."""

    def on_test_batch_end(
        self,
        trainer: Trainer,
        pl_module: AnyModule,
        outputs: AnyOutput,
        batch: AnyBatch,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Called after a batch of a test."""

    def on_predict_start(self, trainer: Trainer, pl_module: AnyModule) -> None:
        """Called before a prediction."""

    def on_predict_end(self, trainer: Trainer, pl_module: AnyModule) -> None:
        """Called after a prediction."""

    def on_predict_epoch_start(self, trainer: Trainer, pl_module: AnyModule) -> None:
        """Called before the first loader of a prediction."""

    def on_predict_epoch_end(self, trainer: Trainer, pl_module: AnyModule) -> None:
        """Called after the last batch of a prediction."""

    def on_predict_batch_start(
        self, trainer: Trainer, pl_module: AnyModule, batch: AnyBatch, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Called before a batch of a prediction."""

    def on_predict_batch_end(
        self,
        trainer: Trainer,
        pl_module: AnyModule,
        outputs: AnyOutput,
        batch: AnyBatch,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Called after a batch of a prediction; `outputs` is the output of `predict_step`."""

    def on_before_zero_grad(self, trainer: Trainer, pl_module: AnyModule, optimizer: Optimizer) -> None:
        """Called before gradients are zeroed, once per window for each optimizer."""

    def on_before_backward(self, trainer: Trainer, pl_module: AnyModule, loss: Tensor) -> None:
        """Called before a backward pass; `loss` has shape (), on the device."""

    def on_after_backward(self, trainer: Trainer, pl_module: AnyModule) -> None:
        """Called after a backward pass. Gradients are sums over the window so far, and may include a loss scale."""

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: AnyModule, optimizer: Optimizer) -> None:
        """Called before clipping and the step, for each optimizer; gradients are those of the window, unscaled."""

    def on_exception(self, trainer: Trainer, pl_module: AnyModule, exception: BaseException) -> None:
        """Called when a run fails or is interrupted; the exception is raised again afterwards."""

    def on_save_checkpoint(self, trainer: Trainer, pl_module: AnyModule, checkpoint: StateDict) -> None:
        """Called before a checkpoint is written; the dict may be changed in place."""

    def on_load_checkpoint(self, trainer: Trainer, pl_module: AnyModule, checkpoint: StateDict) -> None:
        """Called before the callbacks' states are restored from a checkpoint."""


def as_hook(method: StepFunction, *first: str) -> StepFunction:
    """Return a hook that calls a method with these arguments first: one method can serve several hooks."""

    def hook(self: Callback, *arguments: Any, **named: Any) -> None:
        method(self, *first, *arguments, **named)

    hook.__doc__ = method.__doc__
    return hook


def from_rank_zero(trainer: Trainer, decide: Callable[[], R]) -> R:
    """Return what the function returns on rank 0, on every rank; an error of rank 0 is raised on every rank.

    For decisions that depend on files, clocks or random numbers. It communicates: call it on every rank at the same
    point. With one process, or on a rank that is alone after an error, the function is called directly.
    """
    if not trainer.ranks_answer:
        return decide()
    from .rank_zero import decided_on_rank_zero  # not imported where there is one process

    return decided_on_rank_zero(trainer.strategy, decide)


class Checkpoint(Callback):
    """Base of callbacks that write checkpoints. Their hooks run after the module, metrics, loggers and others."""

    runs_last = True
    hears_every_step = True  # writing a checkpoint takes all ranks
    ends_with_run = False
    """Whether what it has saved is removed when the run ends, so that it replaces no other checkpoint callback."""

    def find_newer(self, trainer: Trainer, step: int) -> str | None:
        """Return a state of this run after the step of its last checkpoint, for `ckpt_path="last"`. On every rank.

        Args:
            trainer: The trainer.
            step: `global_step` of the last checkpoint; -1 if there is none.

        Returns:
            Its path, which may differ between nodes; None if there is none.
        """
        return None

    def kept_step(self, trainer: Trainer) -> int:
        """Return the step of the state that `find_newer` would return on a restart; -1 if there is none."""
        return -1


def find_state(states: Iterable[str], key: str) -> str | None:
    """Return the key in a checkpoint's states that has the same arguments, by value, so that 1 equals 1.0; else None.

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
