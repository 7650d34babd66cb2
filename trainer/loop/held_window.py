"""Micro-batches that are held until the window is complete: then the strategy runs them, or the optimizer does.

A pipeline runs them through its stages (`RunsWindows.run_window`), and may split each batch into several micro-batches.
LBFGS and others evaluate them several times: each time with the same random numbers and buffers.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...data.move import find_batch_size
from ...data.parts import join_outputs, split_batch
from ...data.rng import capture_rng, restore_rng
from ...data.sources.base import NO_BATCH
from ...precision.closures import reads_gradients_first
from ...protocols import StateDict
from ...strategies import NoLoss
from ..metrics.accumulators import accumulation_dtype
from ..metrics.metric_objects import load_metric_states, metric_states
from .loss import Loss, read_loss
from .window import detached_mean, fill_gradients, outputs_of

if TYPE_CHECKING:
    from ...data.sources.base import NoBatch
    from ...protocols import Batch, StepOutput
    from ..run import FitRun

# Any in this file: batches, and what steps return.


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The input of `training_step`: a batch of the loader, or a part of one.

    Attributes:
        batch: On the device; NO_BATCH where only other ranks have one.
        offset: Number of its batch in the window.
        size: Samples in it; None where it is an entire batch.
        share: Of its batch, by samples: what a mean counts for.
    """

    batch: Any
    offset: int
    size: int | None = None
    share: Fraction | int = 1  # exact: shares add up to 1


@dataclass(frozen=True, slots=True)
class Drawn:
    """State that an evaluation changes besides gradients: random numbers, buffers, states of metric objects."""

    rng: StateDict = field(default_factory=dict)
    buffers: dict[nn.Module, dict[str, Tensor | None]] = field(default_factory=dict)
    metrics: dict[str, StateDict] = field(default_factory=dict)

    @classmethod
    def of(cls, run: FitRun) -> Drawn:
        """Return the current state."""
        copies = {
            one: {name: None if it is None else it.detach().clone() for name, it in one._buffers.items()}
            for one in run.module.modules()
        }
        return cls(capture_rng(), copies, metric_states(run.module, copy=True))

    def restore(self, run: FitRun) -> None:
        """Restore it, buffers in place where they can be; those that were not there are removed."""
        restore_rng(self.rng)
        load_metric_states(run.module, deepcopy(self.metrics))  # updates must not reach it
        with torch.no_grad():
            for owner, values in self.buffers.items():
                for name in [name for name in owner._buffers if name not in values]:
                    delattr(owner, name)
                for name, value in values.items():
                    buffer = owner._buffers.get(name)
                    if value is None or buffer is None or (buffer.shape, buffer.dtype) != (value.shape, value.dtype):
                        owner._buffers[name] = None if value is None else value.clone()
                    else:
                        buffer.copy_(value)


class _NothingToStepWithError(Exception):
    """Leaves the optimizer's step if no micro-batch of any rank had a loss in its first evaluation."""


class HeldWindow:
    """The micro-batches of one window, which the strategy or the optimizer runs when all are there; see `Held`.

    An optimizer that needs a closure (LBFGS) evaluates the window several times: `log`, metric objects, buffers and
    random numbers count the first evaluation only, and hooks around backward fire at each one.

    Args:
        run: The run.
    """

    def __init__(self, run: FitRun) -> None:
        self._run, self._plan, self._first = run, run.plan, run.progress.batches_in_epoch
        self._batches: list[Batch | NoBatch] = []  # of the loader
        self._sizes: list[int | None] = []  # samples in each, None where unknown
        # Of each: what training_step returned in the first evaluation (that of parts joined), and its loss as a value.
        self._outcomes: list[tuple[StepOutput, Tensor | None]] = []
        self._micro_batches: list[MicroBatch] = []
        self._outputs: list[StepOutput] = []  # of micro-batches, in the first evaluation
        self._shares: list[Tensor] = []
        self._of_losses: dict[int, MicroBatch] = {}  # by the ids of losses
        self._num_steps = self._num_losses = 0
        self._before = self._after = Drawn()

    def add(self, batch: Batch | NoBatch, index: int, *, is_last: bool) -> None:
        """Add a batch of the loader, in as many parts as the strategy wants.

        Raises:
            DataError: It cannot be split.
        """
        offset, metrics = len(self._batches), self._run.metrics
        size = None
        if batch is not NO_BATCH:
            size = None if metrics.sizes is None else metrics.sizes.of(batch)  # now: it is the stream's latest batch
            metrics.sized, metrics.size = batch, size
        self._batches.append(batch)
        self._sizes.append(size)
        self._split(offset, self._run.fabric.strategy.traits.parts_per_batch)

    def _split(self, offset: int, num_parts: int, by: str = "micro_batches=") -> None:
        """Add the micro-batches of a batch."""
        batch, size = self._batches[offset], self._sizes[offset]
        if num_parts == 1 or batch is NO_BATCH:
            self._micro_batches.append(MicroBatch(batch, offset))
            return
        parts, lengths = split_batch(
            batch, num_parts, num_samples=None if find_batch_size(batch) is None else size, by=by
        )
        total = sum(lengths)
        self._micro_batches += [
            MicroBatch(part, offset, length, Fraction(length, total) if length else 1)
            for part, length in zip(parts, lengths, strict=True)
        ]

    def step(self) -> bool:
        """Run the micro-batches and step, or let the optimizer evaluate them as often as it needs to."""
        if self._plan.needs_closure:
            return self._step_with_closure()
        self._evaluate()
        return self._plan.finish_window(self._run, self._outcomes[-1][1])

    def end_batch(self, batch: Batch | NoBatch, index: int, *, is_last: bool) -> None:
        """Fire `on_train_batch_end` of all micro-batches after the last one."""
        if not is_last:
            return
        run, last = self._run, len(self._batches) - 1
        for offset, (held, (output, loss)) in enumerate(zip(self._batches, self._outcomes, strict=True)):
            run.at_boundary = offset == last
            if held is not NO_BATCH:
                run.lifecycle.on_train_batch_end(outputs_of(output, loss), held, self._first + offset)
            elif offset == last:
                run.lifecycle.end_step_without_batch(self._first + offset)

    def _step_with_closure(self) -> bool:
        run, optimizer = self._run, self._plan.optimizer
        assert optimizer is not None
        has_stepped = False
        step_by_module = self._plan.step_by_module
        try:
            if reads_gradients_first(optimizer):
                self._closure()
            if step_by_module is None:
                has_stepped = run.fabric.optimizer_step(optimizer, self._closure)
            else:
                has_stepped = step_by_module(self._closure)
        except _NothingToStepWithError:
            optimizer.zero_grad()
        run.metrics.is_muted = False
        if has_stepped:
            run.progress.steps += 1
        else:
            reason = "empty" if run.window_loss.is_empty else "refused"
            run.watch.note_skipped(run.progress, reason, is_rank_zero=run.fabric.is_global_zero)
        return has_stepped

    def _closure(self) -> Tensor:
        """Return the loss of the window, whose gradients are scaled and clipped."""
        run, window, optimizer = self._run, self._run.window_loss, self._plan.optimizer
        assert optimizer is not None
        is_again = run.metrics.is_muted = bool(self._outcomes)
        if is_again:
            self._before.restore(run)
        else:
            self._before = Drawn.of(run)
        with torch.enable_grad():  # the optimizer's step may turn them off
            self._evaluate()
        if is_again:
            self._after.restore(run)
        else:
            self._after = Drawn.of(run)
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
        plan.begin_window(len(self._batches))
        plan.zero_grad()
        self._shares.clear()
        self._of_losses.clear()
        self._num_steps = self._num_losses = 0
        if plan.run_window is None:
            losses: Sequence[Tensor | Loss | NoLoss | None] = self._run_in_order()
        else:
            losses = plan.run_window([one.batch for one in self._micro_batches], self._forward, self._take_share)
            if run.has_ranks:
                run.window_loss.join_stages()
            for _ in self._shares:
                life.on_after_backward()
        if self._outcomes:
            return
        self._note(losses)
        if run.watch.keeps:
            run.watch.losses.extend(loss for _, loss in self._outcomes if loss is not None)

    def _note(self, losses: Sequence[Tensor | Loss | NoLoss | None]) -> None:
        """Note output and loss of each batch of the loader, in the first evaluation."""
        # The strategy may have steps of its own.
        outputs = self._outputs or [None if isinstance(loss, NoLoss) else loss for loss in losses]
        for offset in range(len(self._batches)):
            numbers = [number for number, one in enumerate(self._micro_batches) if one.offset == offset]
            parts = [self._micro_batches[number] for number in numbers]
            output = join_outputs([outputs[n] for n in numbers], [one.size or 0 for one in parts])
            self._outcomes.append((output, _joined_loss([losses[number] for number in numbers], parts)))

    def _run_in_order(self) -> list[Tensor | Loss | NoLoss | None]:
        losses = []
        for number, one in enumerate(self._micro_batches):
            loss = self._forward(one.batch, number)
            losses.append(loss)
            self._backward(loss)
        return losses

    def _backward(self, loss: Tensor | Loss | NoLoss | None) -> None:
        plan, life = self._plan, self._run.lifecycle
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
                fill_gradients(plan.optimizer)

    def _compare_forms(self, loss: Tensor | Loss | None) -> None:
        """Compare the forms of losses over ranks, until one has a loss. On every rank: it communicates."""
        self._run.window_loss.synchronize_form(loss)

    def _forward(self, batch: object, number: int, *, counts: bool = True) -> Any:
        """Run training_step on a micro-batch and return its loss; see `RunsWindows.run_window`."""
        run, plan, metrics = self._run, self._plan, self._run.metrics
        one = self._micro_batches[number]
        if not counts:
            return self._forward_muted(batch, one.offset)
        if batch is NO_BATCH:
            output = plan.without_data(run.model)
        else:
            metrics.select_batch(batch, self._sizes[one.offset] if one.size is None else one.size)
            metrics.table = plan.table
            output = plan.training_step(batch, self._first + one.offset)
            metrics.table = metrics.nowhere
        no_loss = output if output.__class__ is NoLoss else None
        output = None if no_loss is not None else output
        loss = read_loss(output)
        if len(self._outputs) < len(self._micro_batches):
            self._outputs.append(output)
        if run.window_loss.form is None:
            self._compare_forms(loss)
        self._num_steps += 1
        if loss is None:
            self._reduce_after_last()
        else:
            self._num_losses += 1
            self._of_losses[id(loss)] = one
        return no_loss if loss is None else loss

    def _forward_muted(self, batch: object, offset: int) -> Any:
        """Run training_step for a stage before the last, and return its result; what it logs is ignored."""
        metrics = self._run.metrics
        # Outside of the table of training_step: it gets no key that only stages before the last have.
        was_disabled, metrics.is_disabled = metrics.is_disabled, True
        try:
            return self._plan.training_step(batch, self._first + offset)
        finally:
            metrics.is_disabled = was_disabled

    def _share_of(self, loss: Tensor | Loss) -> Tensor:
        run, window = self._run, self._run.window_loss
        one = self._of_losses[id(loss)]
        share = window.share(loss, one.share)
        if run.skips_bad_steps:
            window.is_finite = window.is_finite and bool(torch.isfinite(share).all())
        self._shares.append(share)
        self._reduce_after_last()
        return share

    def _take_share(self, loss: Tensor | Loss) -> Tensor:
        """Return what backward is called on, scaled where the precision scales; see `RunsWindows.run_window`."""
        share = self._share_of(loss)
        self._run.lifecycle.on_before_backward(share)
        return self._run.fabric.precision.scale_loss(share)

    def _reduce_after_last(self) -> None:
        """Reduce the weight of the window over ranks when all its losses are known: before the last backward pass."""
        is_complete = self._num_steps == len(self._micro_batches) and len(self._shares) == self._num_losses
        if self._run.has_ranks and is_complete:
            self._run.window_loss.reduce()


def _joined_loss(losses: Sequence[Any], parts: Sequence[MicroBatch]) -> Tensor | None:
    """Return the loss of a batch as a value, from the losses of its parts; None if no part has a loss."""
    found = [
        (loss, one.share)
        for loss, one in zip(losses, parts, strict=True)
        if loss is not None and not isinstance(loss, NoLoss)
    ]
    if len(found) < 2:
        return detached_mean(found[0][0]) if found else None
    if isinstance(found[0][0], Loss):
        total = torch.stack([loss.sum.detach() for loss, _ in found]).sum()
        return Loss(total, sum(loss.weight for loss, _ in found)).mean()
    whole = sum(share for _, share in found)
    return torch.stack([loss.detach().reshape(()) / float(whole / share) for loss, share in found]).sum()
