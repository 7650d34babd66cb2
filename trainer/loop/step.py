"""One training step: an accumulation window of micro-batches, one optimizer step.

`train_window` is the recipe. One process is the world of size one. A rank without data is a source that yields none. In
manual optimization the module does what stands inside the window. Windows that are held until all of their batches are
there have their own recipe (`train_held_window`).

The hot path: nothing here reads the device unless bad steps are to be skipped, and nothing is looked up by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...data.move import find_batch_size
from ...data.sources.base import NO_BATCH
from ...strategies import NoLoss
from ..run import FitRun
from .loss import Loss, read_loss
from .schedule import step_due_schedules

if TYPE_CHECKING:
    from torch.optim import Optimizer

_SYNCHRONIZED = nullcontext()


def train_window(run: FitRun, size: int) -> bool:
    """Train on the next window: forward and backward of each micro-batch, then clip, step, schedule.

    Args:
        run: The run; its stream has at least one batch on some rank.
        size: Micro-batches planned, equal on all ranks; the window is shorter when the data ends before.

    Returns:
        False when on_train_batch_start asked to skip the rest of the epoch, which it must do on all ranks alike: the
        window is dropped, nothing stepped.
    """
    plan, stream, life, metrics, progress = run.plan, run.stream, run.lifecycle, run.metrics, run.progress
    window, watch, sizes = run.window_loss, run.watch, metrics.sizes
    assert sizes is not None
    plan.begin_window(size)
    metrics.window += 1
    metrics.step = progress.steps + 1
    run.at_boundary = run.has_stepped = False
    first = index = progress.batches_in_epoch
    last = first + size - 1
    samples = 0
    # A plain mean in a window of one needs no bookkeeping: it is its own share, and its gradient is right as it is.
    is_single = window.planned == 1 and not run.has_ranks
    is_plain = False
    # Where ranks synchronize in the last micro-batch, it has to be known before it. Else the next one is read after it,
    # as a handwritten loop does: the step may fill what it is read from.
    looks_ahead = run.has_ranks or plan.deferred is not None
    while True:
        host_batch = stream.next_batch()
        has_batch = host_batch is not NO_BATCH
        batch = output = seen = zero = None
        if has_batch:
            batch = metrics.batch = plan.transfer(host_batch)
            metrics.sized = None
        run.batch_idx = index
        is_last = index == last or (looks_ahead and not stream.has_next())
        if has_batch and life.on_train_batch_start(batch, index) == -1:
            drop_window(run)
            return False

        if index == first and plan.zeroes_early:
            plan.zero_grad()
        with _SYNCHRONIZED if is_last or plan.deferred is None else plan.deferred():
            if has_batch:
                metrics.table = plan.table
                output = plan.training_step(batch, index)
                metrics.table = metrics.nowhere
            else:
                output = run.fabric.strategy.without_data(run.model)
            if plan.backward is None:  # manual optimization: the module has done the rest
                seen = _loss_of_manual(output)
            else:
                if output.__class__ is NoLoss:
                    zero, output = output.zero, None
                loss = output if output.__class__ is Tensor else read_loss(output)
                if index == first and not plan.zeroes_early:
                    plan.zero_grad()
                if window.form is None:
                    _compare_first_batch(run, batch, loss)
                share: Tensor | None = None
                if loss is not None:
                    is_plain = is_single and loss.__class__ is Tensor and not loss.ndim
                    # isinstance would say that a plain loss is a tensor; its class was compared already.
                    share = loss if is_plain else window.share(loss)  # type: ignore[assignment]
                    if plan.needs_loss:
                        if loss.__class__ is Tensor:
                            seen = metrics.detached if metrics.source() is loss else loss.detach()
                        else:
                            seen = detached_mean(loss)
                    if run.skips_bad_steps and share is not None:
                        # The user asked to skip bad steps: that takes the value now, one host read per micro-batch.
                        window.is_finite = window.is_finite and bool(torch.isfinite(share).all())
                if is_last and run.has_ranks:
                    window.reduce()
                if share is not None and (share.requires_grad or loss.__class__ is not Loss):
                    life.on_before_backward(share)
                    plan.backward(share)
                    life.on_after_backward()
                elif zero is not None and is_last and zero.requires_grad:
                    plan.backward(zero)
                elif share is not None and not run.has_ranks:
                    fill_gradients(plan.optimizer)
            if seen is not None and watch.keeps:
                watch.losses.append(seen)
        if has_batch:
            if metrics.sized is batch:  # the module has logged a mean over the epoch
                samples += metrics.size or 0
            else:
                found = find_batch_size(batch)
                samples += (found if found == sizes.expected else sizes.resolve(batch, found)) or 0
        if not (is_last or looks_ahead):
            is_last = not stream.has_next()

        if is_last:
            is_good = not (run.skips_bad_steps and window.is_to_be_skipped())
            run.has_stepped = plan.finish_window(run, seen, is_plain=is_plain, is_finite=is_good)
            count_window(run, index + 1 - first, samples)
        if has_batch:
            life.on_train_batch_end(outputs_of(output, seen) if plan.needs_outputs else None, batch, index)
        elif is_last:
            life.end_step_without_batch(index)
        if is_last:
            return True
        index += 1


def finish_window(run: FitRun, loss: Tensor | None, *, is_plain: bool, is_finite: bool) -> bool:
    """Scale, unscale, clip and step; return whether the optimizer stepped, and count it."""
    plan, life, progress = run.plan, run.lifecycle, run.progress
    window = run.window_loss
    optimizer = plan.optimizer
    if optimizer is None and (run.stepped or run.is_counted):  # the module makes the step
        run.stepped.clear()
        run.is_counted = False
        progress.steps += 1
        return True
    if (not is_plain and window.is_empty) or not is_finite:
        reason = "empty" if is_finite or window.has_nothing else "nonfinite"
        run.watch.note_skipped(run.progress, reason, is_rank_zero=run.fabric.is_global_zero)
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
        if not (plan.take_step(optimizer) if plan.step_by_module is None else plan.step_by_module(lambda: loss)):
            run.watch.note_skipped(run.progress, "refused", is_rank_zero=run.fabric.is_global_zero)
            return False
    progress.steps += 1
    return True


def count_own_step(run: FitRun, loss: Tensor | None, *, is_plain: bool, is_finite: bool) -> bool:
    """Finish a window in manual optimization: return whether the module made a step, and count it."""
    if not (run.stepped or run.is_counted):
        return False
    run.is_counted = False
    run.progress.steps += 1
    return True


def count_window(run: FitRun, num_batches: int, samples: int) -> None:
    """Count a finished window, and step the schedules that are due."""
    plan, progress = run.plan, run.progress
    progress.batches_in_epoch += num_batches
    progress.total_batches += num_batches
    progress.samples += samples
    if plan.count_window is not None:
        plan.count_window(samples)
    if run.schedulers and run.is_automatic:
        plan.step_schedules(run)
    run.at_boundary = True


def fill_gradients(optimizer: Optimizer | None) -> None:
    """Give parameters without a gradient one of 0: what a sum without a graph adds, such as one over no elements."""
    for group in () if optimizer is None else optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)


def _compare_first_batch(run: FitRun, batch: object, loss: Tensor | Loss | None) -> None:
    """Compare over ranks what they read and which form their losses have; until a rank has had a loss."""
    from .rank_coordination import check_first_batch

    check_first_batch(run, batch)
    run.window_loss.synchronize_form(loss)


def drop_window(run: FitRun) -> None:
    """Discard the present window: the epoch ends here, and the schedules that count epochs are stepped.

    Raises:
        ModuleError: Other ranks continue to train.
    """
    if run.has_ranks:
        from .rank_coordination import require_skip_everywhere

        require_skip_everywhere(run.trainer)
    if run.is_automatic:
        run.watch.note_left(run.progress, is_rank_zero=run.fabric.is_global_zero)
        if run.plan.optimizer is not None:
            run.plan.optimizer.zero_grad()
            run.fabric.strategy.discard_gradients(run.model)
        if run.schedulers:
            step_due_schedules(run, "epoch", run.progress.epochs + 1)
    run.at_boundary = run.progress.epoch_left = True


def step_schedules(run: FitRun) -> None:
    """Step the schedules that count optimizer steps, and at the epoch's last batch those that count epochs."""
    stream, progress = run.stream, run.progress
    if run.has_stepped:
        step_due_schedules(run, "step", progress.steps)
    if not stream.has_next():
        step_due_schedules(run, "epoch", progress.epochs + 1)


# --- outcomes ------------------------------------------------------------------------------------------------------


def outputs_of(output: object, seen: Tensor | None) -> dict[str, object] | None:
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


def _loss_of_manual(output: object) -> Tensor | None:
    if isinstance(output, Mapping) and "loss" not in output:
        return None
    loss = read_loss(output)
    return None if loss is None else detached_mean(loss)


def detached_mean(loss: Tensor | Loss) -> Tensor:
    """Return the loss as a value: shape (), on its device."""
    return (loss.mean() if isinstance(loss, Loss) else loss).detach()
