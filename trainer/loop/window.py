"""One training step: an accumulation window of micro-batches, and one optimizer step.

`train_window` is the recipe, from the first batch to the log. Windows differ in three parts of it only:

    plain    `plan.loss_and_backward` is `loss_and_backward`, and `plan.finish_window` is `finish_window`: both below
    manual   the module calls backward and steps its optimizers: `loss_in_manual`, `count_own_step` (manual.py)
    held     an optimizer evaluates the window again, or a pipeline runs it: `HeldWindow` (held_window.py)

What the recipe calls, and where it is:

    stream.next_batch            the next batch, or NO_BATCH on a rank whose data ended before: data/stream.py
    window.share, .reduce,       divide the loss by the weight of the window, on all ranks: loss.py; `is_divided`
      .gradient_factor             says that the gradients need no further factor
    plan.no_sync, .clip,         bound at the beginning of fit: `StepPlan` (trainer/run.py) describes them,
      .take_step and others        `make_plan` (trainer/session/assemble.py) makes them
    life.on_train_batch_end      callbacks, the module, then `FitActions.after_batch`, which logs the step and looks at
                                   the losses kept in `run.watch` (trainer/session/fit_actions.py, non_finite.py)

The hot path: nothing is looked up by name, and nothing here reads the device, except to skip bad steps
(`nonfinite_loss="skip"`) and to know whether other ranks had a loss when this one had none.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Protocol

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

    from ...data.sources.base import NoBatch
    from ...protocols import Batch, StepOutput

_SYNCHRONIZED = nullcontext()


def train_window(run: FitRun, size: int) -> bool:
    """Train on the next window of micro-batches.

        for each of them        fetch, on_train_batch_start, forward, loss, backward; before the last backward: reduce
            after the last one  scale, clip, step; count; step the schedules
            log                 on_train_batch_end: callbacks, the module, loggers, checkpoints

    Gradients are zeroed around the first forward pass: before it where no hook listens, which saves their memory.

    Args:
        run: The run; its stream has at least one batch on some rank.
        size: Micro-batches planned, equal on all ranks; the window is shorter when the data ends before.

    Returns:
        False when on_train_batch_start asked to skip the rest of the epoch, which it must do on all ranks alike: the
        window is dropped, nothing stepped.
    """
    plan, stream, life, metrics, progress = run.plan, run.stream, run.lifecycle, run.metrics, run.progress
    sizes = metrics.sizes
    assert sizes is not None
    plan.begin_window(size)  # the losses add up from here
    held = None if plan.hold is None else plan.hold(run)
    metrics.window += 1
    metrics.step = progress.steps + 1
    run.at_boundary = run.has_stepped = False
    first = index = progress.batches_in_epoch
    samples = 0
    while True:
        # Fetch. A rank whose data end before those of the others takes part in the window without a batch.
        batch = stream.next_batch()
        output: Any = None  # of training_step; the last one is freed before the next forward pass
        loss: Tensor | None = None
        has_batch = batch is not NO_BATCH
        if has_batch:
            batch = metrics.batch = plan.transfer(batch)
            metrics.sized = None
        run.batch_idx = index
        is_last = index - first == size - 1 or (plan.looks_ahead and not stream.has_next())
        if has_batch and life.on_train_batch_start(batch, index) == -1:
            _drop_window(run)
            return False

        # Forward, loss, backward. Gradients are reduced over ranks in the last micro-batch only.
        if held is not None:
            held.add(batch, index, is_last=is_last)
        else:
            with _SYNCHRONIZED if is_last or plan.no_sync is None else plan.no_sync():
                if index == first and plan.zeroes_early:
                    plan.zero_grad()
                if has_batch:
                    metrics.table = plan.table  # where self.log puts values
                    output = plan.training_step(batch, index)
                    metrics.table = metrics.nowhere
                else:
                    output = plan.without_data(run.model)
                loss = plan.loss_and_backward(run, output, is_first=index == first, is_last=is_last)
        # Count samples; then look whether the data end here, if it was not known before.
        if has_batch:
            if metrics.sized is batch:  # logging a mean over the epoch has counted them
                samples += metrics.size or 0
            else:
                found = find_batch_size(batch)
                samples += (found if found == sizes.expected else sizes.resolve(batch, found)) or 0
        is_last = is_last or not (plan.looks_ahead or stream.has_next())

        # Scale, clip, step; count; step the schedules that are due.
        if is_last:
            run.has_stepped = plan.finish_window(run, loss) if held is None else held.step()
            num_batches = index + 1 - first
            progress.batches_in_epoch += num_batches
            progress.total_batches += num_batches
            progress.samples += samples
            if plan.count_window is not None:
                plan.count_window(samples)
            if run.schedulers and run.is_automatic:
                plan.step_schedules(run)
            run.at_boundary = True

        # Log. Micro-batches that were held end with the last one.
        if held is not None:
            held.end_batch(batch, index, is_last=is_last)
        elif has_batch:
            life.on_train_batch_end(outputs_of(output, loss) if plan.needs_outputs else None, batch, index)
        elif is_last:
            life.end_step_without_batch(index)
        if is_last:
            return True
        index += 1


def loss_and_backward(run: FitRun, output: Any, *, is_first: bool, is_last: bool) -> Tensor | None:
    """Run backward on what `training_step` returned for a micro-batch.

    Args:
        run: The run.
        output: A loss in one of its forms, None, or what the strategy has for a rank without one.
        is_first: Whether it is the window's first micro-batch.
        is_last: Whether it is the last one, before which ranks reduce what their windows weigh.

    Returns:
        The loss as a value, detached; None without one, and where nothing needs it.
    """
    plan, life, metrics, window = run.plan, run.lifecycle, run.metrics, run.window_loss
    zero: Tensor | None = None
    if output.__class__ is NoLoss:
        zero, output = output.zero, None
    loss = output if output.__class__ is Tensor else read_loss(output)
    if is_first and not plan.zeroes_early:
        plan.zero_grad()
    if window.form is None:
        _compare_first_batch(run, loss)

    # What backward is called on: the share of the window's loss. A plain mean in a window of one is its own.
    share: Tensor | None = None
    value: Tensor | None = None
    if loss is not None:
        if window.planned == 1 and not run.has_ranks and loss.__class__ is Tensor and not loss.ndim:
            share, window.is_divided = loss, True
        else:
            share = window.share(loss)
        if plan.needs_loss:
            if loss.__class__ is Tensor:
                value = metrics.detached if metrics.source() is loss else loss.detach()
            else:
                value = detached_mean(loss)
        if run.skips_bad_steps:
            # nonfinite_loss="skip" needs the value now: one host read per micro-batch.
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
    if value is not None and run.watch.keeps:
        run.watch.losses.append(value)
    return value


class Held(Protocol):
    """The micro-batches of one window that are not run as they come."""

    def add(self, batch: Batch | NoBatch, index: int, *, is_last: bool) -> None:
        """Take the next micro-batch.

        Args:
            batch: On the device; NO_BATCH where only other ranks have one.
            index: Its number in the epoch.
            is_last: Whether it ends the window, where that is known before it is run: always with `plan.looks_ahead`.
        """

    def step(self) -> bool:
        """Run them and step; count the step, and return whether there was one."""

    def end_batch(self, batch: Batch | NoBatch, index: int, *, is_last: bool) -> None:
        """Fire `on_train_batch_end` for this micro-batch, or for all of the window after its last one."""


def finish_window(run: FitRun, loss: Tensor | None) -> bool:
    """Scale, unscale, clip and step; count the step, and return whether there was one."""
    plan, life, progress, window = run.plan, run.lifecycle, run.progress, run.window_loss
    optimizer = plan.optimizer
    if run.skips_bad_steps:  # ranks agree: a bad loss of one of them skips the step of all
        window.is_finite = not window.is_to_be_skipped()
    if optimizer is None and (run.stepped or run.is_counted):  # the module makes the step
        run.stepped.clear()
        run.is_counted = False
        progress.steps += 1
        return True
    if (not window.is_divided and window.is_empty) or not window.is_finite:
        reason = "empty" if window.is_finite or window.has_nothing else "nonfinite"
        run.watch.note_skipped(run.progress, reason, is_rank_zero=run.fabric.is_global_zero)
        if optimizer is not None:
            optimizer.zero_grad()
        return False
    if optimizer is not None:
        factor = None if window.is_divided else window.gradient_factor()
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


def fill_gradients(optimizer: Optimizer | None) -> None:
    """Give parameters without a gradient one of 0: what a sum without a graph adds, such as one over no elements."""
    for group in () if optimizer is None else optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)


def _compare_first_batch(run: FitRun, loss: Tensor | Loss | None) -> None:
    """Compare over ranks what they read and which form their losses have; until a rank has had a loss."""
    from .rank_coordination import check_first_batch

    check_first_batch(run, run.metrics.batch)
    run.window_loss.synchronize_form(loss)


def _drop_window(run: FitRun) -> None:
    """Discard the present window: the epoch ends here, and the schedules that count epochs are stepped.

    Raises:
        ModuleError: Other ranks continue to train.
    """
    if run.has_ranks:
        from .rank_coordination import require_skip_everywhere

        require_skip_everywhere(run.trainer)
    if run.carried is not None:
        run.carried.count = 0
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


def outputs_of(output: StepOutput, seen: Tensor | None) -> dict[str, object] | None:
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


def detached_mean(loss: Tensor | Loss) -> Tensor:
    """Return the loss as a value: shape (), on its device."""
    return (loss.mean() if isinstance(loss, Loss) else loss).detach()
