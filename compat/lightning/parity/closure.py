"""The training step inside of `optimizer.step`, as its closure."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ....data.sources.base import NO_BATCH, NoBatch
from ....protocols import Batch, Closure, StepOutput
from ....trainer.loop.loss import Loss, read_loss
from ....trainer.loop.manual import loss_in_manual
from ....trainer.loop.shrink import ShrinkingWindow
from ....trainer.loop.window import detached_mean, outputs_of
from ....trainer.run import FitRun

__all__ = ["step_with_closures"]


def step_with_closures(run: FitRun) -> None:
    """Let optimizers get the training step of a window's last micro-batch as their closure."""
    plan = run.plan
    is_one_step = run.is_automatic and plan.optimizer is not None and plan.run_window is None
    if not is_one_step or plan.hold is ShrinkingWindow or run.fabric.precision.has_scaler or run.skips_bad_steps:
        return
    plan.hold, plan.looks_ahead = _ClosureWindow, True
    for managed in run.managed:
        managed.take_step = partial(_take_step, run)


class _ClosureWindow:
    """A window whose last micro-batch is evaluated by the optimizer, and those before it as they come; see `Held`."""

    def __init__(self, run: FitRun) -> None:
        self._run = run
        self._latest: _Evaluation | None = None

    def add(self, batch: Batch | NoBatch, index: int, *, is_last: bool) -> None:
        """Evaluate the micro-batch, if it is not the last one."""
        plan = self._run.plan
        evaluation = _Evaluation(self._run, batch, index, is_first=self._latest is None, is_last=is_last)
        self._latest = evaluation
        if not is_last:
            with plan.no_sync() if plan.no_sync else nullcontext(), torch.enable_grad():
                evaluation()

    def step(self) -> bool:
        """Step with the last micro-batch as closure; it counts."""
        run, optimizer, evaluation = self._run, self._run.managed[0], self._latest
        assert evaluation is not None
        own = run.lifecycle.own("optimizer_step")
        if own is None:
            optimizer.step(evaluation)
        else:
            own(run.progress.epochs, run.batch_idx, optimizer, evaluation)
        run.progress.steps += 1
        return True

    def end_batch(self, batch: Batch | NoBatch, index: int, *, is_last: bool) -> None:
        """Fire `on_train_batch_end`."""
        run, evaluation = self._run, self._latest
        assert evaluation is not None
        if batch is not NO_BATCH:
            outputs = outputs_of(evaluation.output, evaluation.seen) if run.plan.needs_outputs else None
            run.lifecycle.on_train_batch_end(outputs, batch, index)
        elif is_last:
            run.lifecycle.end_step_without_batch(index)


class _Evaluation:
    """Forward and backward pass of one micro-batch.

    Attributes:
        output: What training_step returned.
        seen: Its loss as a value, detached; None without one.
    """

    def __init__(self, run: FitRun, batch: Batch | NoBatch, index: int, *, is_first: bool, is_last: bool) -> None:
        self._run, self._batch, self._index = run, batch, index
        self._is_first, self._is_last = is_first, is_last
        self.output: StepOutput = None
        self.seen: Tensor | None = None
        self._is_repeated = False

    def __call__(self) -> Tensor | None:
        """Return the loss of the micro-batch, divided as its gradient is."""
        run, plan, life, metrics = self._run, self._run.plan, self._run.lifecycle, self._run.metrics
        window = run.window_loss
        output: Any = None
        zero: Tensor | None = None
        if self._is_repeated and self._is_first:  # by an optimizer that evaluates several times; only one counts
            plan.begin_window(1)
        elif self._is_repeated and window.reference is None:
            window.count -= 1
        self._is_repeated = True
        if self._batch is NO_BATCH:
            zero = getattr(run.fabric.strategy.without_data(run.model), "zero", None)
        else:
            outer, metrics.table = metrics.table, plan.table
            output = plan.training_step(self._batch, self._index)
            metrics.table = outer
        self.output, loss = output, read_loss(output)
        if self._is_first:
            plan.zero_grad()
        if run.has_ranks and window.form is None:
            window.synchronize_form(loss)
        share: Tensor | None = None
        if loss is not None:
            share = window.share(loss)
            self.seen = detached_mean(loss) if isinstance(loss, Loss) else loss.detach()
            if run.watch.keeps:
                run.watch.losses.append(self.seen)
        if self._is_last and run.has_ranks:
            window.reduce()
        if plan.loss_and_backward is loss_in_manual:
            pass  # an epoch that only evaluates
        elif share is not None:
            life.on_before_backward(share)
            plan.backward(share)
            life.on_after_backward()
        elif zero is not None and self._is_last and zero.requires_grad:
            plan.backward(zero)
        return None if share is None else share.detach()


def _take_step(run: FitRun, optimizer: Optimizer, closure: Closure | None) -> bool:
    """Step an optimizer with a closure after which gradients are scaled and clipped."""
    plan = run.plan

    def evaluate() -> object:
        loss = None if closure is None else closure()
        factor = None if run.window_loss.is_empty else run.window_loss.gradient_factor()
        if factor is not None:
            run.fabric.strategy.scale_gradients(optimizer, factor)
        run.lifecycle.on_before_optimizer_step(optimizer)
        if plan.clip is not None:
            plan.clip()
        return loss

    return run.fabric.optimizer_step(optimizer, evaluate)
