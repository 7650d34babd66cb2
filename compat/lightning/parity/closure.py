"""The training step inside of `optimizer.step`, as its closure."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ....data.sources.base import NO_BATCH
from ....protocols import Batch, StepOutput
from ....trainer.behavior import Behavior
from ....trainer.loop.fit_loop import FitLoop
from ....trainer.loop.loss import Loss, read_loss
from ....trainer.loop.step import count_window, detached_mean, drop_window, outputs_of
from ....trainer.run import FitRun

__all__ = ["step_with_closures", "train_window_with_closure"]


def step_with_closures(behavior: Behavior) -> Behavior:
    """Let optimizers get the training step of a window's last micro-batch as their closure."""
    choose_step = partial(_choose_step, behavior.loop.choose_step)
    return replace(behavior, loop=replace(behavior.loop, choose_step=choose_step))


def _choose_step(
    choose: Callable[[FitLoop, FitRun], Callable[[FitRun, int], bool]], loop: FitLoop, run: FitRun
) -> Callable[[FitRun, int], bool]:
    chosen, plan = choose(loop, run), run.plan
    is_one_step = run.is_automatic and plan.optimizer is not None and plan.run_window is None
    if not is_one_step or run.fabric.precision.has_scaler or run.skips_bad_steps:
        return chosen
    for managed in run.managed:
        managed.take_step = partial(_take_step, run)
    return train_window_with_closure


def train_window_with_closure(run: FitRun, size: int) -> bool:
    """Train on the next window; arguments and result as `train_window`."""
    plan, stream, life, metrics, progress = run.plan, run.stream, run.lifecycle, run.metrics, run.progress
    assert metrics.sizes is not None
    plan.begin_window(size)
    metrics.window += 1
    metrics.step = progress.steps + 1
    run.at_boundary = run.has_stepped = False
    first = index = progress.batches_in_epoch
    last = first + size - 1
    samples = 0
    while True:
        batch = stream.next_batch()
        if batch is not NO_BATCH:
            batch = metrics.batch = plan.transfer(batch)
            metrics.sized = None
        run.batch_idx = index
        is_last = index == last or not stream.has_next()
        if batch is not NO_BATCH and life.on_train_batch_start(batch, index) == -1:
            drop_window(run)
            return False
        evaluation = _Evaluation(run, batch, index, is_first=index == first, is_last=is_last)
        if is_last:
            optimizer = run.managed[0]
            own = life.own("optimizer_step")
            if own is None:
                optimizer.step(evaluation)
            else:
                own(progress.epochs, index, optimizer, evaluation)
            progress.steps += 1
            run.has_stepped = True
        else:
            with plan.deferred() if plan.deferred else nullcontext(), torch.enable_grad():
                evaluation()
        if batch is not NO_BATCH:
            samples += metrics.sizes.of(batch) or 0
        if is_last:
            count_window(run, index + 1 - first, samples)
        if batch is not NO_BATCH:
            outputs = outputs_of(evaluation.output, evaluation.seen) if plan.needs_outputs else None
            life.on_train_batch_end(outputs, batch, index)
        elif is_last:
            life.end_step_without_batch(index)
        if is_last:
            return True
        index += 1


class _Evaluation:
    """Forward and backward pass of one micro-batch.

    Attributes:
        output: What training_step returned.
        seen: Its loss as a value, detached; None without one.
    """

    def __init__(self, run: FitRun, batch: Batch, index: int, *, is_first: bool, is_last: bool) -> None:
        self._run, self._batch, self._index = run, batch, index
        self._is_first, self._is_last = is_first, is_last
        self.output: StepOutput = None
        self.seen: Tensor | None = None
        self._is_repeated = False

    def __call__(self) -> Tensor | None:
        """Return the loss of the micro-batch, divided as its gradient is."""
        run, plan, life, metrics = self._run, self._run.plan, self._run.lifecycle, self._run.metrics
        window, backward = run.window_loss, plan.backward
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
        if backward is None:
            pass  # an epoch that only evaluates
        elif share is not None:
            life.on_before_backward(share)
            backward(share)
            life.on_after_backward()
        elif zero is not None and self._is_last and zero.requires_grad:
            backward(zero)
        return None if share is None else share.detach()


def _take_step(run: FitRun, optimizer: Optimizer, closure: Callable[[], object] | None) -> bool:
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
