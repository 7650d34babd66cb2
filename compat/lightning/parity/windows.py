"""Accumulation windows as Lightning counts and divides them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ....trainer.loop.loss import RanksWindowLoss, WindowLoss
from ....trainer.loop.window import finish_window
from ....trainer.run import FitRun, Run

__all__ = [
    "FullRanksWindowLoss",
    "FullWindowLoss",
    "divide_outputs",
    "divide_short_windows",
    "step_without_loss",
    "window_size",
]


class FullWindowLoss(WindowLoss):
    """Divides by the size of a full window, also where the epoch's end makes it shorter.

    Args:
        run: The run, whose trainer knows the size.
    """

    __slots__ = ("_size",)

    def __init__(self, run: Run) -> None:
        self._size = window_size(run)
        super().__init__(run.fabric.device)

    def begin(self, planned: int) -> None:
        """Start a window; its losses are divided by the full size."""
        super().begin(self._size())

    def gradient_factor(self) -> Tensor | float | None:
        """Return None for means: gradients stay as they are."""
        return None if self.reference is None else super().gradient_factor()


class FullRanksWindowLoss(RanksWindowLoss):
    """`FullWindowLoss` on several ranks.

    Args:
        run: The run, whose trainer knows the size.
    """

    __slots__ = ("_size",)

    def __init__(self, run: Run) -> None:
        self._size = window_size(run)
        super().__init__(run.fabric.device, run.fabric.strategy, counts=False)

    def begin(self, planned: int) -> None:
        """Start a window; its losses are divided by the full size."""
        super().begin(self._size())


def window_size(run: Run) -> Callable[[], int]:
    """Return a function that returns the micro-batches of a window in the current epoch."""
    trainer = run.trainer

    def full_size() -> int:
        scheduler = trainer.accumulation_scheduler
        if scheduler is None:
            return trainer.accumulate_grad_batches
        return scheduler.get_accumulate_grad_batches(trainer.progress.epochs)

    return full_size


def divide_short_windows(run: Run) -> None:
    """Let a window that the epoch's end cuts short be divided as a full one."""
    if type(run.window_loss) is WindowLoss:
        run.window_loss = FullWindowLoss(run)
    elif type(run.window_loss) is RanksWindowLoss:
        run.window_loss = FullRanksWindowLoss(run)


def step_without_loss(run: FitRun) -> None:
    """Let the optimizer step after a window in which every training_step returned None."""
    plan = run.plan
    _change_outputs(run, lambda outputs: {} if outputs is None else outputs)
    if plan.finish_window is not finish_window or plan.optimizer is None:
        return
    optimizer = plan.optimizer

    def finish(run: FitRun, loss: Tensor | None) -> bool:
        window = run.window_loss
        is_skipped = run.skips_bad_steps and window.is_to_be_skipped()
        if window.is_divided or is_skipped or not window.is_empty:
            return finish_window(run, loss)
        run.lifecycle.on_before_optimizer_step(optimizer)
        if plan.clip is not None:
            plan.clip()
        if not (plan.take_step(optimizer) if plan.step_by_module is None else plan.step_by_module(lambda: loss)):
            return False
        run.progress.steps += 1
        return True

    plan.finish_window = finish


def divide_outputs(run: FitRun) -> None:
    """Let hooks at the end of a batch get the loss divided by the size of a full window."""
    if not run.is_automatic:
        return
    full_size = window_size(run)

    def divided(outputs: Any) -> Any:
        size = full_size()
        if size == 1 or not outputs or not isinstance(outputs.get("loss"), Tensor):
            return outputs
        return {**outputs, "loss": outputs["loss"] / size}

    _change_outputs(run, divided)


def _change_outputs(run: FitRun, change: Callable[[Any], Any]) -> None:  # Any: what `outputs_of` returns
    """Let listeners to the end of a training batch get other outputs."""
    if not run.plan.needs_outputs:
        return
    run.lifecycle.wrap(
        "on_train_batch_end", lambda fire: lambda outputs, batch, index: fire(change(outputs), batch, index)
    )
