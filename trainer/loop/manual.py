"""Manual optimization: backward passes, gradient clipping, toggled optimizers, and gradients kept in checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.optim import Optimizer

from ...errors import ConfigError, ModuleError
from ...messages import warn
from ...precision.base import evaluates_again
from ...protocols import Closure, StepOutput, TensorInFile
from ..run import FitRun, Run
from .loss import read_loss
from .optimizers import ManagedOptimizer
from .schedule import parameters_of
from .window import detached_mean


def loss_in_manual(run: FitRun, output: StepOutput, *, is_first: bool, is_last: bool) -> Tensor | None:
    """Return the loss in what `training_step` returned as a value: the module has run backward, and has stepped."""
    if isinstance(output, Mapping) and "loss" not in output:
        return None
    loss = read_loss(output)
    value = None if loss is None else detached_mean(loss)
    if value is not None and run.watch.keeps:
        run.watch.losses.append(value)
    return value


def count_own_step(run: FitRun, loss: Tensor | None) -> bool:
    """Finish a window in manual optimization: return whether the module made a step, and count it."""
    if not (run.stepped or run.is_counted):
        return False
    run.is_counted = False
    run.progress.steps += 1
    return True


def plain_optimizer(optimizer: Optimizer | ManagedOptimizer) -> Optimizer:
    """Return torch's own optimizer."""
    # isinstance() would say that a managed optimizer is a torch one.
    return optimizer.optimizer if type(optimizer) is ManagedOptimizer else optimizer  # type: ignore[return-value]


def manual_backward(run: Run, loss: Tensor, *args: object, **kwargs: object) -> None:
    """Run a backward pass with its hooks, through precision and strategy."""
    run.lifecycle.on_before_backward(loss)
    scaled = run.fabric.precision.scale_loss(loss)
    own = run.lifecycle.own("backward")
    if own is not None:
        own(scaled, *args, **kwargs)
    else:
        run.fabric.strategy.backward(scaled, *args, **kwargs)
    if run.has_ranks:
        run.unreduced = list(run.optimizers)
        give_back(run)
    run.lifecycle.on_after_backward()


def reduce_gradients(run: Run, optimizer: Optimizer) -> None:
    """Average an optimizer's gradients over ranks, if a backward pass has changed them since. On every rank alike.

    Averaging again with new gradients is correct, too: averages are equal on all ranks and do not change.
    """
    if any(optimizer is one for one in run.unreduced):
        run.unreduced = [one for one in run.unreduced if one is not optimizer]
        run.fabric.strategy.average_gradients(parameters_of(optimizer))


def step_in_manual(run: Run, optimizer: Optimizer, closure: Closure | None) -> bool:
    """Step an optimizer that the module steps itself; return whether it stepped."""
    toggles = run.trainer._lw_toggles
    if toggles.toggled:
        toggles.check(optimizer)
    reduce_gradients(run, optimizer)
    if closure is None:
        run.fabric.unscale_gradients(optimizer)
        run.lifecycle.on_before_optimizer_step(optimizer)
    else:  # gradients are those of its evaluations
        closure = _evaluating(run, optimizer, closure)
    timeline = run.trainer.timeline
    if timeline.is_open:
        timeline.enter("optimizer")
    has_stepped = run.fabric.optimizer_step(optimizer, closure)
    if timeline.is_open:
        timeline.leave()
    if has_stepped:
        run.stepped.append(optimizer)
        give_back(run)
    return has_stepped


def count_step(run: Run) -> None:
    """Count a step that no optimizer makes; see `Module.count_step`.

    Raises:
        ModuleError: No training batch is under way, the trainer steps an optimizer, or an engine keeps the gradients.
    """
    if run.at_boundary:
        raise ModuleError(
            "count_step was called where no training batch is under way, as in a validation.",
            fix="call it in training_step, before the update.",
        )
    if run.own_steps is None:
        raise ModuleError(
            "count_step was called while the trainer steps an optimizer, and counts its steps.",
            fix="set self.automatic_optimization = False in __init__, or return None from configure_optimizers.",
        )
    strategy, precision = run.fabric.strategy, run.fabric.precision
    if strategy.traits.owns_optimizers or precision.has_scaler:
        name = type(strategy).__name__ if strategy.traits.owns_optimizers else f"precision={precision.precision!r}"
        raise ModuleError(
            f"count_step was called with {name}, where only the step of an optimizer sees the gradients as they are.",
            fix="use another strategy and precision for updates that no optimizer makes, such as 'bf16-mixed'.",
        )
    for optimizer in run.optimizers:
        reduce_gradients(run, optimizer)
    if run.has_ranks and not run.optimizers:
        strategy.average_gradients(list(run.module.parameters()))
    run.is_counted = True


def give_back(run: Run) -> None:
    """Reshard parameters that a forward pass without a backward pass has left gathered.

    The next pass would run on it, as it is: with values from before a step, and with the `requires_grad` of parameters
    from before an optimizer was toggled. A graph that still needs it gathers it again.
    """
    if not run.fabric.strategy.traits.shards_parameters:
        return
    from ...strategies.fsdp.root import ShardedRoot, reshard

    if isinstance(run.model, ShardedRoot):
        reshard(run.model)


def _evaluating(run: Run, optimizer: Optimizer, closure: Closure) -> Callable[[], object]:
    """Return the closure with gradients that are averaged and unscaled, and seen by hooks.

    The loss is averaged, too, where the optimizer evaluates the model itself: it must decide alike on all ranks.
    """
    averages = run.has_ranks and evaluates_again(optimizer)

    def evaluate() -> object:
        with torch.enable_grad():
            loss = closure()
        reduce_gradients(run, optimizer)
        run.fabric.unscale_gradients(optimizer)
        run.lifecycle.on_before_optimizer_step(optimizer)
        is_scalar = isinstance(loss, float) or (isinstance(loss, Tensor) and loss.numel() == 1)
        return run.fabric.all_reduce(loss) if averages and is_scalar else loss

    return evaluate


def waiting_gradients(run: Run) -> list[list[Tensor | None]]:
    """Return the gradients that a module accumulates over batches, of optimizers that the last batch did not step.

    Returns:
        A list for each optimizer, empty where nothing waits: the gradients of its parameters, in order.
    """
    if run.fabric.strategy.traits.owns_optimizers:
        return [[] for _ in run.optimizers]
    waiting = []
    for optimizer in run.optimizers:
        has_stepped = any(optimizer is one for one in run.stepped)
        if run.ranks_answer and not has_stepped:  # rank 0 writes the checkpoint, and all ranks read it
            reduce_gradients(run, optimizer)
        gradients = [] if has_stepped else [parameter.grad for parameter in parameters_of(optimizer)]
        waiting.append(gradients if any(gradient is not None for gradient in gradients) else [])
    return waiting


def restore_gradients(run: Run, waiting: list[list[Tensor | TensorInFile | None]]) -> None:
    """Restore the gradients that `waiting_gradients` returned."""
    strategy = run.fabric.strategy
    if strategy.traits.owns_optimizers:
        if any(waiting) and strategy.is_global_zero:
            warn(
                f"{type(strategy).__name__} cannot load gradients: those accumulated since the last step are left out",
            )
        return
    for optimizer, gradients in zip(run.optimizers, waiting, strict=True):
        for parameter, gradient in zip(parameters_of(optimizer), gradients, strict=bool(gradients)):
            parameter.grad = None if gradient is None else _placed(gradient, parameter)


def _placed(gradient: Tensor | TensorInFile, parameter: Tensor) -> Tensor:
    """Return a gradient as its parameter is: on its device, and sharded where that is."""
    from ...strategies.distributed.shards import as_shards, is_sharded, read_full

    if is_sharded(parameter):
        return as_shards(gradient, parameter)
    whole: Tensor = read_full(gradient)
    return whole.to(parameter.device)


def step_given(run: Run, optimizer: Optimizer, closure: Closure | None) -> bool:
    """Step for a module's own `optimizer_step` in automatic optimization.

    The closure evaluates the window for optimizers that evaluate it; otherwise it only returns the loss.
    """
    return run.fabric.optimizer_step(optimizer, closure)


def clip_gradients(run: Run, optimizer: Optimizer, value: float | None, algorithm: str | None) -> Tensor | None:
    """Clip an optimizer's gradients by norm or value; return the norm before, where it is by norm.

    Raises:
        ConfigError: The algorithm is unknown.
    """
    if not value:
        return None
    reduce_gradients(run, optimizer)
    name = (algorithm or "norm").lower()
    if name == "norm":
        return run.fabric.clip_gradients(run.model, optimizer, max_norm=value, error_if_nonfinite=False)
    if name == "value":
        return run.fabric.clip_gradients(run.model, optimizer, clip_val=value)
    if name == "agc":
        return run.fabric.clip_gradients(run.model, optimizer, agc_factor=value)
    raise ConfigError(f"clip_gradients got the algorithm {algorithm!r}.", fix="use 'norm', 'value' or 'agc'.")


class Toggles:
    """Lets only the parameters of one optimizer require gradients: of the one that was toggled last.

    Attributes:
        toggled: The optimizers that are toggled, the latest last.
    """

    def __init__(self) -> None:
        self.toggled: list[Optimizer] = []
        self._off: dict[int, Tensor] = {}  # what requires gradients when nothing is toggled
        self._has_warned = False

    def toggle(self, optimizer: Optimizer, optimizers: list[Optimizer]) -> None:
        """Turn off gradients of the other optimizers' parameters; this optimizer's parameters keep their setting."""
        for parameter in [one for other in optimizers for one in parameters_of(other)]:
            if parameter.requires_grad:
                self._off[id(parameter)] = parameter
        self.toggled = [*(one for one in self.toggled if one is not optimizer), optimizer]
        self._apply()

    def untoggle(self, optimizer: Optimizer) -> None:
        """Undo `toggle` of this optimizer; one that was toggled before it and not undone applies again."""
        self.toggled = [one for one in self.toggled if one is not optimizer]
        self._apply()

    def end(self) -> None:
        """Undo what a run has left toggled."""
        self.toggled = []
        self._apply()

    def check(self, optimizer: Optimizer) -> None:
        """Warn once of a step of an optimizer whose parameters are turned off by another that is still toggled."""
        if self._has_warned:
            return
        parameters = parameters_of(optimizer)
        if any(one.requires_grad for one in parameters) or not any(id(one) in self._off for one in parameters):
            return
        if all(one.grad is None for one in parameters):
            self._has_warned = True
            name = type(self.toggled[-1]).__name__
            warn(
                f"{type(optimizer).__name__} steps without gradients: another optimizer ({name}) is still toggled. "
                "Call self.untoggle_optimizer before, or use `with self.toggled_optimizer(optimizer):`",
            )

    def _apply(self) -> None:
        mine = {id(parameter) for parameter in parameters_of(self.toggled[-1])} if self.toggled else self._off.keys()
        for number, parameter in self._off.items():
            parameter.requires_grad = number in mine
        if not self.toggled:
            self._off = {}
