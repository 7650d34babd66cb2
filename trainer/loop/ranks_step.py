"""One training step on several ranks.

The same recipe as `step.automatic_step`, and what ranks owe to each other on top of it: a rank without a batch, or
whose step returned None, takes part in the reduction of gradients all the same, and the weight of the window is that of
all ranks together. Nothing here waits for the device, unless bad steps are to be skipped.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor

from ...data.distributed.shard import NO_BATCH
from ...data.move import find_batch_size
from ...strategies import NoLoss
from ..run import Run
from .loss import Loss, read_loss
from .ranks import check_first_batch
from .ranks_loss import RanksWindowLoss
from .step import detached_mean, drop_window, outputs_of

__all__ = ["ranks_step"]

_SYNCHRONISED = nullcontext()


def ranks_step(run: Run, size: int) -> bool:
    """Train on the next window: forward and backward of each micro-batch, then clip, step, schedule.

    Args:
        run: The run; its stream has at least one batch on some rank.
        size: Micro-batches planned, equal on all ranks.

    Returns:
        False when on_train_batch_start asked to skip the rest of the epoch, which it must do on all ranks alike.
    """
    plan, stream, life, metrics, progress = run.plan, run.stream, run.lifecycle, run.metrics, run.progress
    window, watch, strategy, sizes = run.window_loss, run.watch, run.fabric.strategy, metrics.sizes
    assert plan is not None
    assert stream is not None
    assert sizes is not None
    assert isinstance(window, RanksWindowLoss)
    plan.begin_window(size)
    metrics.window += 1
    metrics.step = progress.steps + 1
    run.at_boundary = run.has_stepped = False
    first = index = progress.batches_in_epoch
    last = first + size - 1
    samples = 0
    is_finite = True
    while True:
        host_batch = stream.next_batch()
        has_batch = host_batch is not NO_BATCH
        run.batch_idx = index
        is_last = index == last or not stream.has_next()
        batch = output = None
        if has_batch:
            batch = metrics.batch = plan.transfer(host_batch)
            metrics.sized = None
            if life.on_train_batch_start(batch, index) == -1:
                drop_window(run)
                return False
        if index == first and plan.zeroes_early:
            plan.zero_grad()
        with _SYNCHRONISED if is_last else plan.deferred():
            if has_batch:
                metrics.table = plan.table
                output = plan.training_step(batch, index)
                metrics.table = metrics.nowhere
            else:
                output = strategy.without_data(run.model)
            zero = None
            if output.__class__ is NoLoss:
                zero, output = output.zero, None
            loss = output if output.__class__ is Tensor else read_loss(output)
            if index == first and not plan.zeroes_early:
                plan.zero_grad()
            if window.form is None:  # the first batch of the run
                check_first_batch(run, batch)
                window.agree(loss)
            seen = share = None
            if loss is not None:
                share = window.share(loss)
                if plan.needs_loss:
                    seen = detached_mean(loss)
                if run.skips_bad_steps:
                    # The user asked to skip bad steps: that takes the value now, one host read per micro-batch.
                    is_finite = is_finite and bool(torch.isfinite(share).all())
            if is_last:
                window.reduce(is_finite=is_finite)
            if share is not None and (share.requires_grad or loss.__class__ is not Loss):
                life.on_before_backward(share)
                plan.backward(share)
                life.on_after_backward()
            elif zero is not None and is_last and zero.requires_grad:
                plan.backward(zero)
            if seen is not None and watch.keeps:
                watch.losses.append(seen)
        if has_batch:
            found = find_batch_size(batch)
            samples += (found if found == sizes.expected else sizes.resolve(batch, found)) or 0
        if is_last:
            is_good = not (run.skips_bad_steps and window.is_to_be_skipped())
            run.has_stepped = plan.finish_window(run, seen, is_plain=False, is_finite=is_good)
            progress.batches_in_epoch = index + 1
            progress.total_batches += index + 1 - first
            progress.samples += samples
            if plan.count_window is not None:
                plan.count_window(samples)
            if run.schedulers:
                plan.step_schedules(run)
            run.at_boundary = True
        if has_batch:
            life.on_train_batch_end(outputs_of(output, seen) if plan.hears_batch_end else None, batch, index)
        elif is_last:
            life.end_step_without_batch(index)
        if is_last:
            return True
        index += 1
