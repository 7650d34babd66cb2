"""One training step: an accumulation window of micro-batches, one optimizer step.

`train_window` is the recipe. One process is the world of size one. A rank without data is a source that yields none. In
manual optimization the module does what stands inside the window. `train_held_window` holds the micro-batches of a
window until all are there: the optimizer evaluates them several times, or the strategy runs them
(`Strategy.run_window`).

The hot path: nothing here reads the device unless bad steps are to be skipped, and nothing is looked up by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...data.move import find_batch_size
from ...data.sources.base import NO_BATCH
from ...strategies import NoLoss
from ..metrics.accumulators import accumulation_dtype
from ..run import Run
from .loss import Loss, read_loss
from .schedule import step_due_schedules

__all__ = [
    "count_own_step",
    "detached_mean",
    "drop_window",
    "finish_window",
    "outputs_of",
    "step_schedules",
    "train_held_window",
    "train_window",
]

if TYPE_CHECKING:
    from torch.optim import Optimizer

_SYNCHRONIZED = nullcontext()


def train_window(run: Run, size: int) -> bool:
    """Train on the next window: forward and backward of each micro-batch, then clip, step, schedule.

    Args:
        run: The run; its stream has at least one batch on some rank.
        size: Micro-batches planned, equal on all ranks; the window is shorter when the data ends before.

    Returns:
        False when on_train_batch_start asked to skip the rest of the epoch, which it must do on all ranks alike: the
        window is dropped, nothing stepped.
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
    # A plain mean in a window of one needs no bookkeeping: it is its own share, and its gradient is right as it is.
    is_single = window.planned == 1 and not run.has_ranks
    is_plain = False
    while True:
        host_batch = stream.next_batch()
        has_batch = host_batch is not NO_BATCH
        batch = output = seen = zero = None
        if has_batch:
            batch = metrics.batch = plan.transfer(host_batch)
            metrics.sized = None
        run.batch_idx = index
        is_last = index == last or not stream.has_next()
        if has_batch and life.on_train_batch_start(batch, index) == -1:
            drop_window(run)
            return False

        if index == first and plan.zeroes_early:
            plan.zero_grad()
        with _SYNCHRONIZED if is_last else plan.deferred():
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
                        seen = loss.detach() if loss.__class__ is Tensor else detached_mean(loss)
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
                    _fill_gradients(plan.optimizer)
            if seen is not None and watch.keeps:
                watch.losses.append(seen)
        if has_batch:
            found = find_batch_size(batch)
            samples += (found if found == sizes.expected else sizes.resolve(batch, found)) or 0

        if is_last:
            is_good = not (run.skips_bad_steps and window.is_to_be_skipped())
            run.has_stepped = plan.finish_window(run, seen, is_plain=is_plain, is_finite=is_good)
            _count_window(run, index + 1 - first, samples)
        if has_batch:
            life.on_train_batch_end(outputs_of(output, seen) if plan.hears_batch_end else None, batch, index)
        elif is_last:
            life.end_step_without_batch(index)
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
        if not (plan.take_step(optimizer) if plan.step_by_module is None else plan.step_by_module(loss)):
            run.watch.note_skipped(run, "refused")
            return False
    progress.steps += 1
    return True


def count_own_step(run: Run, loss: Tensor | None, *, is_plain: bool, is_finite: bool) -> bool:
    """Finish a window in manual optimization: return whether the module stepped any optimizer, and count it."""
    if run.stepped:
        run.progress.steps += 1
    return bool(run.stepped)


def _count_window(run: Run, num_batches: int, samples: int) -> None:
    """Count a finished window, and step the schedules that are due."""
    plan, progress = run.plan, run.progress
    assert plan is not None
    progress.batches_in_epoch += num_batches
    progress.total_batches += num_batches
    progress.samples += samples
    if plan.count_window is not None:
        plan.count_window(samples)
    if run.schedulers and run.is_automatic:
        plan.step_schedules(run)
    run.at_boundary = True


def _fill_gradients(optimizer: Optimizer | None) -> None:
    """Give parameters without a gradient one of 0: what a sum without a graph adds, such as one over no elements."""
    for group in () if optimizer is None else optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)


def _compare_first_batch(run: Run, batch: object, loss: Tensor | Loss | None) -> None:
    """Compare over ranks what they read and which form their losses have; until a rank has had a loss."""
    from .rank_coordination import check_first_batch

    check_first_batch(run, batch)
    run.window_loss.synchronize_form(loss)


def drop_window(run: Run) -> None:
    """Discard the present window: the epoch ends here, and the schedules that count epochs are stepped.

    Raises:
        ModuleError: Other ranks continue to train.
    """
    assert run.plan is not None
    if run.has_ranks:
        from .rank_coordination import require_skip_everywhere

        require_skip_everywhere(run.trainer)
    if run.is_automatic:
        run.watch.note_left(run)
        if run.plan.optimizer is not None:
            run.plan.optimizer.zero_grad()
            run.fabric.strategy.discard_gradients(run.model)
        if run.schedulers:
            step_due_schedules(run, "epoch", run.progress.epochs + 1)
    run.at_boundary = run.progress.epoch_left = True


def step_schedules(run: Run) -> None:
    """Step the schedules that count optimizer steps, and at the epoch's last batch those that count epochs."""
    stream, progress = run.stream, run.progress
    assert stream is not None
    if run.has_stepped:
        step_due_schedules(run, "step", progress.steps)
    if not stream.has_next():
        step_due_schedules(run, "epoch", progress.epochs + 1)


# --- windows that are held -----------------------------------------------------------------------------------------


def train_held_window(run: Run, size: int) -> bool:
    """Train on the next window, whose micro-batches are held until the strategy or the optimizer has run them.

    An optimizer that needs a closure (LBFGS) evaluates the window several times: `log` counts the first evaluation
    only, and hooks around backward fire at each one. Arguments and result as `train_window`.
    """
    plan, stream, life, metrics, progress = run.plan, run.stream, run.lifecycle, run.metrics, run.progress
    assert plan is not None
    assert stream is not None
    assert metrics.sizes is not None
    metrics.window += 1
    metrics.step = progress.steps + 1
    run.at_boundary = run.has_stepped = False
    first = progress.batches_in_epoch
    held = _HeldWindow(run, first)
    while len(held.batches) < size and stream.has_next():
        batch = stream.next_batch()
        run.batch_idx = first + len(held.batches)
        if batch is not NO_BATCH:
            batch = metrics.batch = plan.transfer(batch)
            metrics.sized = None
            if life.on_train_batch_start(batch, run.batch_idx) == -1:
                drop_window(run)
                return False
        held.batches.append(batch)

    run.has_stepped = held.step_with_closure() if plan.needs_closure else held.step()
    samples = sum(metrics.sizes.of(batch) or 0 for batch in held.batches if batch is not NO_BATCH)
    _count_window(run, len(held.batches), samples)
    last = len(held.batches) - 1
    for offset, (batch, output, seen) in enumerate(zip(held.batches, held.outputs, held.seen, strict=True)):
        run.at_boundary = offset == last
        if batch is not NO_BATCH:
            life.on_train_batch_end(outputs_of(output, seen), batch, first + offset)
        elif offset == last:
            life.end_step_without_batch(first + offset)
    return True


class _NothingToStepWithError(Exception):
    """Leaves an optimizer in whose first evaluation no micro-batch of any rank had a loss."""


class _HeldWindow:
    """The micro-batches of one window, which are run as often as the optimizer evaluates them.

    Attributes:
        batches: On the device; NO_BATCH where only other ranks have one.
        outputs: What training_step returned for each, in the first evaluation.
        seen: Its loss as a value, detached; None without one.
    """

    def __init__(self, run: Run, first: int) -> None:
        assert run.plan is not None
        self._run, self._plan, self._first = run, run.plan, first
        self.batches: list[object] = []
        self.outputs: list[object] = []
        self.seen: list[Tensor | None] = []
        self._shares: list[Tensor] = []
        self._num_steps = self._num_losses = 0

    def step(self) -> bool:
        """Run the micro-batches, then finish as any window does."""
        run = self._run
        self._evaluate()
        is_finite = not (run.skips_bad_steps and run.window_loss.is_to_be_skipped())
        return self._plan.finish_window(run, self.seen[-1], is_plain=False, is_finite=is_finite)

    def step_with_closure(self) -> bool:
        """Step an optimizer that evaluates the micro-batches as often as it needs to."""
        run, optimizer = self._run, self._plan.optimizer
        assert optimizer is not None
        has_stepped = False
        try:
            has_stepped = run.fabric.optimizer_step(optimizer, self._closure)
        except _NothingToStepWithError:
            optimizer.zero_grad()
        run.metrics.is_muted = False
        if has_stepped:
            run.progress.steps += 1
        else:
            run.watch.note_skipped(run, "empty" if run.window_loss.is_empty else "refused")
        return has_stepped

    def _closure(self) -> Tensor:
        """Return the loss of the window, whose gradients are scaled and clipped."""
        run, window, optimizer = self._run, self._run.window_loss, self._plan.optimizer
        assert optimizer is not None
        run.metrics.is_muted = bool(self.outputs)
        self._evaluate()
        if window.is_empty:
            raise _NothingToStepWithError
        factor = window.gradient_factor()
        means = [share.detach() for share in self._shares]
        total = torch.stack(means).sum() if means else torch.zeros((), device=run.device)
        if run.has_ranks:
            # The optimizer must decide alike on all ranks; one without a loss does not know the others' dtype.
            total = run.fabric.all_reduce(total.to(accumulation_dtype(total.device)))
        if factor is not None:
            run.fabric.strategy.scale_gradients(optimizer, factor)
            total = total * factor
        run.lifecycle.on_before_optimizer_step(optimizer)
        if self._plan.clip is not None:
            self._plan.clip()
        return total

    def _evaluate(self) -> None:
        """Run forward and backward of all micro-batches, and note their losses."""
        run, plan, life = self._run, self._plan, self._run.lifecycle
        is_first_time = not self.outputs
        plan.begin_window(len(self.batches))
        plan.zero_grad()
        self._shares.clear()
        self._num_steps = self._num_losses = 0
        if plan.run_window is None:
            losses: Sequence[Tensor | Loss | NoLoss | None] = self._run_in_order()
        else:
            losses = plan.run_window(self.batches, self._forward, self._take_share)
            if run.has_ranks:
                run.window_loss.join_stages()
            for _ in self._shares:
                life.on_after_backward()
        seen = [None if loss is None or isinstance(loss, NoLoss) else detached_mean(loss) for loss in losses]
        if is_first_time:
            if not self.outputs:  # the strategy has steps of its own
                self.outputs.extend(seen)
            self.seen.extend(seen)
            if run.watch.keeps:
                run.watch.losses.extend(one for one in seen if one is not None)

    def _run_in_order(self) -> list[Tensor | Loss | NoLoss | None]:
        plan, life = self._plan, self._run.lifecycle
        assert plan.backward is not None
        losses = []
        for offset, batch in enumerate(self.batches):
            loss = self._forward(batch, offset)
            losses.append(loss)
            if isinstance(loss, NoLoss):
                if loss.zero.requires_grad:
                    plan.backward(loss.zero)
            elif loss is not None:
                share = self._share_of(loss)
                if share.requires_grad or loss.__class__ is not Loss:
                    life.on_before_backward(share)
                    plan.backward(share)
                    life.on_after_backward()
                else:
                    _fill_gradients(plan.optimizer)
        return losses

    def _forward(self, batch: object, offset: int, *, counts: bool = True) -> Any:
        """Run training_step on a micro-batch and return its loss; see `Strategy.run_window`."""
        run, plan, metrics = self._run, self._plan, self._run.metrics
        if not counts:
            return self._forward_muted(batch, offset)
        if batch is NO_BATCH:
            output = run.fabric.strategy.without_data(run.model)
        else:
            metrics.batch, metrics.sized = batch, None
            metrics.table = plan.table
            output = plan.training_step(batch, self._first + offset)
            metrics.table = metrics.nowhere
        no_loss = output if output.__class__ is NoLoss else None
        output = None if no_loss is not None else output
        loss = read_loss(output)
        if len(self.outputs) < len(self.batches):
            self.outputs.append(output)
        if run.window_loss.form is None:
            run.window_loss.synchronize_form(loss)
        self._num_steps += 1
        self._num_losses += loss is not None
        if loss is None:
            self._reduce_after_last()
        return no_loss if loss is None else loss

    def _forward_muted(self, batch: object, offset: int) -> Any:
        """Run training_step for a stage before the last, and return what comes out; nothing that it logs counts."""
        metrics = self._run.metrics
        was_muted, metrics.is_muted = metrics.is_muted, True
        try:
            return self._plan.training_step(batch, self._first + offset)
        finally:
            metrics.is_muted = was_muted

    def _share_of(self, loss: Tensor | Loss) -> Tensor:
        run, window = self._run, self._run.window_loss
        share = window.share(loss)
        if run.skips_bad_steps:
            window.is_finite = window.is_finite and bool(torch.isfinite(share).all())
        self._shares.append(share)
        self._reduce_after_last()
        return share

    def _take_share(self, loss: Tensor | Loss) -> Tensor:
        """Return what backward is called on, scaled where the precision scales; see `Strategy.run_window`."""
        share = self._share_of(loss)
        self._run.lifecycle.on_before_backward(share)
        return self._run.fabric.precision.scale_loss(share)

    def _reduce_after_last(self) -> None:
        """Let ranks know what the window weighs when all its losses are known: before the last backward pass."""
        is_complete = self._num_steps == len(self.batches) and len(self._shares) == self._num_losses
        if self._run.has_ranks and is_complete:
            self._run.window_loss.reduce()


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
