"""`Trainer(grad_accumulation_dtype="float32")`: sums of 16-bit gradients in float32, over a window and over ranks.

Each gradient is added to a float32 sum as soon as a backward pass has made it, and freed. At the window's end the sums
are averaged over ranks and scaled, and cast once to the parameters' dtype for clipping and the step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...errors import ConfigError
from ...precision.base import evaluates_again
from ...strategies.distributed.gradients import average_tensors
from .schedule import parameters_of

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from ..run import FitRun
    from ..view import TrainerView


class Float32Gradients:
    """The sums of one run's gradients, for parameters of fewer than 32 bits.

    It takes 4 bytes for each such parameter during a window, instead of the 2 bytes of its gradient. With several ranks
    nothing is reduced during the backward pass: the sums are averaged after it.

    Args:
        trainer: Its arguments are checked.
        run: Its plan is set up, and is bound to this object here.

    Raises:
        ConfigError: The run accumulates in a way that these sums do not support; the message says why.
    """

    def __init__(self, trainer: TrainerView, run: FitRun) -> None:
        _refuse(trainer, run)
        plan = run.plan
        self._run = run
        self._optimizer = plan.optimizer
        self._begin_window, self._finish_window = plan.begin_window, plan.finish_window
        plan.begin_window, plan.finish_window = self._begin, self._finish
        self._sums: dict[Tensor, Tensor] = {}
        self._handles: dict[Tensor, RemovableHandle] = {}

    def close(self) -> None:
        """Let torch accumulate gradients again."""
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()
        self._sums.clear()

    def _parameters(self) -> list[Tensor]:
        assert self._optimizer is not None
        return [one for one in parameters_of(self._optimizer) if one.is_floating_point() and one.element_size() < 4]

    def _begin(self, size: int) -> None:
        self._sums.clear()  # of a window that was dropped
        for parameter in self._parameters():
            if parameter.requires_grad and parameter not in self._handles:  # also one that was frozen until now
                self._handles[parameter] = parameter.register_post_accumulate_grad_hook(self._take)
        self._begin_window(size)

    def _take(self, parameter: Tensor) -> None:
        gradient = parameter.grad
        assert gradient is not None
        total = self._sums.get(parameter)
        if total is None:
            self._sums[parameter] = gradient.float()
        else:
            total.add_(gradient)
        parameter.grad = None

    def _finish(self, run: FitRun, loss: Tensor | None) -> bool:
        """Average, scale and cast the sums; then finish the window as any other."""
        parameters = self._parameters()
        sums = [self._sums.pop(parameter, None) for parameter in parameters]
        window, others = run.window_loss, self._others()
        if run.skips_bad_steps:
            window.is_finite = not window.is_to_be_skipped()
        if run.has_ranks:
            average_tensors(parameters, sums, torch.float32)
            run.fabric.strategy.average_gradients(others)
        # After the reduction, where a rank without a loss may ask whether others had one; and once only.
        if window.is_finite and not window.is_divided and window.is_empty:
            assert self._optimizer is not None
            run.watch.note_skipped(run.progress, "empty", is_rank_zero=run.fabric.is_global_zero)
            self._optimizer.zero_grad()
            return False
        if not window.is_finite:
            return self._finish_window(run, loss)
        factor = None if window.is_divided else window.gradient_factor()
        if factor is not None:
            known = [total for total in sums if total is not None]
            known += [one.grad for one in others if one.grad is not None]
            if known:
                torch._foreach_mul_(known, factor)
        for index, parameter in enumerate(parameters):
            total, sums[index] = sums[index], None
            if total is not None:
                parameter.grad = total.to(parameter.dtype)
        window.is_divided = True
        return self._finish_window(run, loss)

    def _others(self) -> list[Tensor]:
        assert self._optimizer is not None
        return [one for one in parameters_of(self._optimizer) if one.element_size() >= 4]


def bind_float32_gradients(trainer: TrainerView, run: FitRun) -> Callable[[], None] | None:
    """Let a run sum its gradients in float32, where its strategy does not do so itself; return what undoes it."""
    if trainer.strategy.accumulate_dtype is None or trainer.strategy.traits.sums_gradients_itself:
        return None
    return Float32Gradients(trainer, run).close


def _refuse(trainer: TrainerView, run: FitRun) -> None:
    reason = None
    if not run.is_automatic:
        reason = "manual optimization, where the module decides when to step"
    elif not run.optimizers:
        reason = "a module without an optimizer"
    elif evaluates_again(run.optimizers[0]):
        reason = f"{type(run.optimizers[0]).__name__}, which evaluates all micro-batches of a window several times"
    elif trainer.accumulate_across_epochs:
        reason = "accumulate_across_epochs=True, whose checkpoints hold gradients as the parameters have them"
    elif run.fabric.precision.has_scaler:
        reason = f"precision={run.fabric.precision.precision!r}, whose parameters and gradients are float32 already"
    if reason is not None:
        raise ConfigError(f"grad_accumulation_dtype='float32' with {reason}.", fix="leave out one of the two.")
