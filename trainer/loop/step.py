"""One training step: a window of micro-batches, one optimizer step.

The hot path: nothing here reads the device, and nothing is looked up by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from ...data.move import find_batch_size
from ...strategies import NoLoss
from ..metrics.accumulators import accumulation_dtype
from ..run import Run
from .loss import Loss, read_loss
from .schedule import step_due_schedules

__all__ = [
    "automatic_step",
    "closure_step",
    "detached_mean",
    "drop_window",
    "finish_window",
    "manual_step",
    "outputs_of",
    "step_schedules",
]

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from .ranks_loss import RanksWindowLoss

_SYNCHRONISED = nullcontext()


def automatic_step(run: Run, size: int) -> bool:
    """Train on the next window: forward and backward of each micro-batch, then clip, step, schedule.

    Args:
        run: The run; its stream has at least one batch.
        size: Micro-batches planned; the window is shorter when the data ends before.

    Returns:
        False when on_train_batch_start asked to skip the rest of the epoch: the window is dropped, nothing stepped.
    """
    plan, stream, life, metrics, progress = run.plan, run.stream, run.lifecycle, run.metrics, run.progress
    assert plan is not None
    assert stream is not None
    window, watch, sizes = run.window_loss, run.watch, metrics.sizes
    assert sizes is not None
    plan.begin_window(size)
    metrics.window += 1
    metrics.step = progress.steps + 1
    run.at_boundary = run.has_stepped = False
    first = index = progress.batches_in_epoch
    last = first + size - 1
    samples = 0
    is_finite = True
    # A plain mean in a window of one needs no bookkeeping: it is its own share, and its gradient is right as it is.
    is_single = window.planned == 1
    is_plain = False
    while True:
        batch = plan.transfer(stream.next_batch())
        metrics.batch, metrics.sized = batch, None
        run.batch_idx = index
        is_last = index == last or not stream.has_next()
        if life.on_train_batch_start(batch, index) == -1:
            drop_window(run)
            return False
        if index == first and plan.zeroes_early:
            plan.zero_grad()
        with _SYNCHRONISED if is_last else plan.deferred():
            metrics.table = plan.table
            output = plan.training_step(batch, index)
            metrics.table = metrics.nowhere
            loss = output if output.__class__ is Tensor else read_loss(output)
            if index == first and not plan.zeroes_early:
                plan.zero_grad()
            seen = None
            if loss is not None:
                is_plain = is_single and loss.__class__ is Tensor and not loss.ndim
                # isinstance would say that a plain loss is a tensor; it was asked already.
                share: Tensor = loss if is_plain else window.share(loss)  # type: ignore[assignment]
                if plan.needs_loss:
                    seen = loss.detach() if loss.__class__ is Tensor else detached_mean(loss)
                if run.skips_bad_steps:
                    # The user asked to skip bad steps: that takes the value now, one host read per micro-batch.
                    is_finite = is_finite and bool(torch.isfinite(share).all())
                if share.requires_grad or loss.__class__ is not Loss:
                    life.on_before_backward(share)
                    plan.backward(share)
                    life.on_after_backward()
                else:
                    _fill_gradients(plan.optimizer)
                if watch.keeps:
                    watch.losses.append(seen)  # type: ignore[arg-type]  # needs_loss holds wherever losses are kept
        found = find_batch_size(batch)
        samples += (found if found == sizes.expected else sizes.resolve(batch, found)) or 0
        if is_last:
            run.has_stepped = plan.finish_window(run, seen, is_plain=is_plain, is_finite=is_finite)
            progress.batches_in_epoch = index + 1
            progress.total_batches += index + 1 - first
            progress.samples += samples
            if plan.count_window is not None:
                plan.count_window(samples)
            if run.schedulers:
                plan.step_schedules(run)
            run.at_boundary = True
        life.on_train_batch_end(outputs_of(output, seen) if plan.hears_batch_end else None, batch, index)
        if is_last:
            return True
        index += 1


def finish_window(run: Run, loss: Tensor | None, *, is_plain: bool, is_finite: bool) -> bool:
    """Scale, unscale, clip and step; return whether the optimizer stepped, and count it."""
    plan, life, progress = run.plan, run.lifecycle, run.progress
    assert plan is not None
    window = run.window_loss
    optimizer = plan.optimizer
    if optimizer is None and run.stepped:  # the module steps one of its own
        run.stepped.clear()
        progress.steps += 1
        return True
    if (not is_plain and window.is_empty) or not is_finite:
        run.watch.note_skipped(run, "empty" if is_finite or window.has_nothing else "nonfinite")
        if optimizer is not None:
            optimizer.zero_grad()
        return False
    if optimizer is not None:
        factor = None if is_plain else window.gradient_factor()
        if factor is not None:
            run.fabric.strategy.scale_gradients(optimizer, factor)
        if plan.unscale is not None:
            plan.unscale()
        life.on_before_optimizer_step(optimizer)
        if plan.clip is not None:
            plan.clip()
        if not plan.take_step(loss):
            run.watch.note_skipped(run, "refused")
            return False
    progress.steps += 1
    return True


def _fill_gradients(optimizer: Optimizer | None) -> None:
    """Give parameters without a gradient one of 0: what a sum without a graph adds, such as one over no elements."""
    for group in () if optimizer is None else optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)


def drop_window(run: Run) -> None:
    """Forget the window under way: the epoch ends here, and the schedules that count epochs are stepped.

    Raises:
        ModuleError: Other ranks train on.
    """
    assert run.plan is not None
    _check_skip(run)
    run.watch.note_left(run)
    if run.plan.optimizer is not None:
        run.plan.optimizer.zero_grad()
        run.fabric.strategy.drop_gradients(run.model)
    if run.schedulers:
        step_due_schedules(run, "epoch", run.progress.epochs + 1)
    run.at_boundary = run.progress.epoch_left = True


def _check_skip(run: Run) -> None:
    """Let the rest of an epoch be skipped on all ranks or on none."""
    if run.has_ranks:
        from .ranks import require_skip_everywhere  # not imported where there is one process

        require_skip_everywhere(run.trainer)


def step_schedules(run: Run) -> None:
    """Step the schedules that count optimizer steps, and at the epoch's last batch those that count epochs."""
    stream, progress = run.stream, run.progress
    assert stream is not None
    if run.has_stepped:
        step_due_schedules(run, "step", progress.steps)
    if not stream.has_next():
        step_due_schedules(run, "epoch", progress.epochs + 1)


def outputs_of(output: Any, seen: Tensor | None) -> Any:  # Any: extras of the user's step
    """Return what on_train_batch_end gets: a dict with the detached loss, undivided, and the step's extras."""
    if output is None:
        return None
    if output.__class__ is Tensor:
        return {"loss": seen}
    if isinstance(output, Mapping):
        detached = {key: value.detach() if isinstance(value, Tensor) else value for key, value in output.items()}
        if seen is not None:
            detached["loss"] = seen
        return detached
    return {"loss": seen}


class _NothingToStepWithError(Exception):
    """Leaves an optimizer in whose first evaluation no micro-batch of any rank had a loss."""


def closure_step(run: Run, size: int) -> bool:
    """Train on the next window with an optimizer that evaluates the model several times (LBFGS).

    The window's micro-batches are held while the optimizer calls back. `log` counts the first evaluation only; hooks
    around backward fire at each one. Returns as `automatic_step`.
    """
    plan, stream, life, metrics, progress = run.plan, run.stream, run.lifecycle, run.metrics, run.progress
    assert plan is not None
    assert stream is not None
    assert plan.optimizer is not None
    assert metrics.sizes is not None
    optimizer = plan.optimizer
    metrics.window += 1
    metrics.step = progress.steps + 1
    run.at_boundary = run.has_stepped = False
    first = progress.batches_in_epoch
    batches: list[Any] = []
    while len(batches) < size and stream.has_next():
        batch = plan.transfer(stream.next_batch())
        metrics.batch, metrics.sized = batch, None
        run.batch_idx = first + len(batches)
        if life.on_train_batch_start(batch, run.batch_idx) == -1:
            drop_window(run)
            return False
        batches.append(batch)
    outputs: list[Any] = []

    def evaluate() -> Tensor:
        is_first_time = not outputs
        metrics.is_muted = not is_first_time
        window = run.window_loss
        window.begin(len(batches))
        means: list[Tensor] = []
        plan.zero_grad()
        for offset, batch in enumerate(batches):
            metrics.batch, metrics.sized = batch, None
            metrics.table = plan.table
            output = plan.training_step(batch, first + offset)
            metrics.table = metrics.nowhere
            zero = None
            if output.__class__ is NoLoss:
                zero, output = output.zero, None
            loss = read_loss(output)
            seen = None
            share = _shared_with_ranks(run, loss, is_last=offset == len(batches) - 1)
            if loss is not None and share is not None:
                seen = detached_mean(loss)
                if share.requires_grad or loss.__class__ is not Loss:
                    life.on_before_backward(share)
                    plan.backward(share)
                    life.on_after_backward()
                else:
                    _fill_gradients(optimizer)
                means.append(share.detach())
            elif zero is not None and zero.requires_grad:
                plan.backward(zero)
            if is_first_time:
                outputs.append((output, seen))
                if seen is not None:
                    run.watch.losses.append(seen)
        if window.is_empty:
            raise _NothingToStepWithError
        factor = window.gradient_factor()
        total = torch.stack(means).sum() if means else torch.zeros((), device=run.device)
        if run.has_ranks:
            # The optimizer must decide alike on all ranks; one without a loss does not know the others' dtype.
            total = run.fabric.all_reduce(total.to(accumulation_dtype(total.device)))
        if factor is not None:
            run.fabric.strategy.scale_gradients(optimizer, factor)
            total = total * factor
        life.on_before_optimizer_step(optimizer)
        if plan.clip is not None:
            plan.clip()
        return total

    try:
        run.has_stepped = run.fabric.optimizer_step(optimizer, evaluate)
    except _NothingToStepWithError:
        optimizer.zero_grad()
    metrics.is_muted = False
    if run.has_stepped:
        progress.steps += 1
    else:
        run.watch.note_skipped(run, "empty" if run.window_loss.is_empty else "refused")
    progress.batches_in_epoch = first + len(batches)
    progress.total_batches += len(batches)
    samples = sum(metrics.sizes.of(batch) or 0 for batch in batches)
    progress.samples += samples
    if plan.count_window is not None:
        plan.count_window(samples)
    if run.schedulers:
        plan.step_schedules(run)
    for offset, (batch, (output, seen)) in enumerate(zip(batches, outputs, strict=True)):
        run.at_boundary = offset == len(batches) - 1
        life.on_train_batch_end(outputs_of(output, seen), batch, first + offset)
    return True


def _shared_with_ranks(run: Run, loss: Tensor | Loss | None, *, is_last: bool) -> Tensor | None:
    """Return this micro-batch's share, None without a loss; after the last, let ranks know what the window weighs."""
    window = run.window_loss
    if run.has_ranks and cast("RanksWindowLoss", window).form is None:
        cast("RanksWindowLoss", window).agree(loss)
    share = None if loss is None else window.share(loss)
    if run.has_ranks and is_last:
        cast("RanksWindowLoss", window).reduce(is_finite=True)
    return share


def manual_step(run: Run, size: int) -> bool:
    """Let the module's training_step do everything on the next batch; count a step if any optimizer stepped in it.

    Returns as `automatic_step`.
    """
    plan, stream, life, metrics, progress = run.plan, run.stream, run.lifecycle, run.metrics, run.progress
    assert plan is not None
    assert stream is not None
    assert metrics.sizes is not None
    metrics.window += 1
    metrics.step = progress.steps + 1
    run.at_boundary = run.has_stepped = False
    run.stepped.clear()
    index = run.batch_idx = progress.batches_in_epoch
    batch = plan.transfer(stream.next_batch())
    metrics.batch, metrics.sized = batch, None
    if life.on_train_batch_start(batch, index) == -1:
        _check_skip(run)
        run.at_boundary = progress.epoch_left = True
        return False
    metrics.table = plan.table
    output = plan.training_step(batch, index)
    metrics.table = metrics.nowhere
    run.has_stepped = bool(run.stepped)
    if run.has_stepped:
        progress.steps += 1
    progress.batches_in_epoch = index + 1
    progress.total_batches += 1
    samples = metrics.sizes.of(batch) or 0
    progress.samples += samples
    if plan.count_window is not None:
        plan.count_window(samples)
    run.at_boundary = True
    seen = _loss_of_manual(output)
    if seen is not None and run.watch.keeps:
        run.watch.losses.append(seen)
    life.on_train_batch_end(outputs_of(output, seen) if plan.hears_batch_end else None, batch, index)
    return True


def _loss_of_manual(output: Any) -> Tensor | None:  # Any: manual steps may return anything or nothing
    if isinstance(output, Mapping) and "loss" not in output:
        return None
    loss = read_loss(output)
    if loss is None:
        return None
    return detached_mean(loss)


def detached_mean(loss: Tensor | Loss) -> Tensor:
    """Return the loss as a value: shape (), on its device."""
    return (loss.mean() if isinstance(loss, Loss) else loss).detach()
