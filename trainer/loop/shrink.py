"""`Trainer(on_oom="shrink")`: a window that runs out of memory is repeated with each of its batches split in two.

The parts of a batch are micro-batches: their losses add up to that of the batch, whether it is a mean or a sum with a
weight, so that the gradients are those of the full batch. What the failed attempt did is undone: gradients, random
numbers, buffers, what was logged. Later windows begin with the smaller parts.

All ranks repeat a window together. Where a strategy communicates after the backward passes only, they agree once,
before it does. Sharded parameters are gathered within each pass: there they agree after each micro-batch, and a rank
that has run out of memory first rejoins the pass that the others are in (strategies/fsdp/broken_pass.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from copy import copy
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer

from ...accelerators.out_of_memory import free_memory, is_out_of_memory
from ...data.move import find_batch_size
from ...data.parts import split_batch
from ...data.sources.base import NO_BATCH
from ...errors import ConfigError
from ...precision.base import evaluates_again
from ...protocols import Closure
from ...strategies.optional import RejoinsPasses
from .held_window import Drawn, HeldWindow, MicroBatch
from .loss import Loss, read_loss
from .schedule import parameters_of

if TYPE_CHECKING:
    from ...strategies import NoLoss
    from ..metrics.accumulators import ScalarAccumulator
    from ..metrics.metrics import Metrics
    from ..run import FitRun
    from ..view import TrainerView

logger = logging.getLogger(__name__)

TakeStep: TypeAlias = Callable[[Optimizer, "Closure | None"], bool]

# Any in this file: what steps return.

_ELSE = "pass a smaller batch size, or see docs/guides/out-of-memory.md for what else takes less memory."


class _OutOfMemoryError(Exception):
    """Leaves an attempt in which some rank ran out of memory."""


class ShrinkingWindow(HeldWindow):
    """The micro-batches of one window, which are repeated in smaller parts where memory runs out.

    Args:
        run: The run.
    """

    def step(self) -> bool:
        """Run the micro-batches, again where memory runs out, and step."""
        run = self._run
        before, logged = Drawn.of(run), _Logged(run.metrics)
        self._split_batches()
        while not self._has_run():
            self._forget()
            before.restore(run)
            logged.restore()
            free_memory(run.device)
            self._split_further()
        if run.has_ranks:
            run.window_loss.reduce()
            self._average()
        return self._plan.finish_window(run, self._outcomes[-1][1])

    def _has_run(self) -> bool:
        try:
            self._evaluate()
        except _OutOfMemoryError:
            return False
        return True

    def _split_batches(self) -> None:
        self._micro_batches = []
        for offset in range(len(self._batches)):
            self._split(offset, self._run.progress.parts_per_batch, by="parts because of on_oom='shrink': ")

    def _split_further(self) -> None:
        """Split batches into twice as many parts from now on, on all ranks, as far as they have samples."""
        run = self._run
        run.progress.parts_per_batch *= 2
        self._split_batches()
        if run.fabric.is_global_zero:
            logger.warning(
                "Out of memory in the window of batch %d (0 is the first batch of training): it is repeated, and from "
                "now on each batch is trained in %d parts, with the gradient of the full batch.",
                run.progress.total_batches,
                run.progress.parts_per_batch,
            )

    def _average(self) -> None:
        """Average gradients that no backward pass has averaged, unless the end of the window does so itself."""
        strategy, optimizer = self._run.fabric.strategy, self._plan.optimizer
        sums_elsewhere = strategy.accumulate_dtype is not None and not strategy.traits.sums_gradients_itself
        if optimizer is not None and strategy.traits.averages_after_backward and not sums_elsewhere:
            strategy.average_gradients(parameters_of(optimizer))

    def _forget(self) -> None:
        """Undo the attempt."""
        run = self._run
        self._shares.clear()
        self._of_losses.clear()
        self._outputs.clear()
        run.metrics.table, run.metrics.detached = run.metrics.nowhere, None
        if self._plan.optimizer is not None:
            self._plan.optimizer.zero_grad()
        strategy = run.fabric.strategy
        strategy.discard_gradients(run.model)
        if isinstance(strategy, RejoinsPasses):
            strategy.break_off(run.model)

    # --- one attempt -------------------------------------------------------------------------------------------------

    def _reduce_after_last(self) -> None:
        """Do nothing: the weight of the window is summed after an attempt that succeeded on all ranks."""

    def _compare_forms(self, loss: Tensor | Loss | None) -> None:
        self._counts.end_forward()
        super()._compare_forms(loss)
        self._counts.begin_backward()

    def _run_in_order(self) -> list[Tensor | Loss | NoLoss | None]:
        run, strategy = self._run, self._run.fabric.strategy
        rejoins = strategy if run.has_ranks and isinstance(strategy, RejoinsPasses) else None
        losses: list[Tensor | Loss | NoLoss | None] = []
        num_passes = len(self._micro_batches)
        run.window_loss.has_parts = num_passes > len(self._batches)
        if rejoins is not None and run.progress.parts_per_batch > 1:  # a rank's last batch may have fewer samples
            num_passes = int(strategy.all_reduce(torch.tensor(num_passes), reduce_op="max"))
        is_short = False
        for number in range(num_passes):
            self._counts = _Counts(rejoins)
            is_short = is_short or not self._fits(number, losses)
            if is_short and rejoins is not None:
                self._rejoin(self._micro_batches[min(number, len(self._micro_batches) - 1)], rejoins)
            elif is_short and run.window_loss.form is None:
                self._compare_forms(None)  # which the other ranks do after each forward pass
            if (is_short and not run.has_ranks) or (rejoins is not None and self._is_short_anywhere(is_short)):
                raise _OutOfMemoryError
        if rejoins is None and run.has_ranks and self._is_short_anywhere(is_short):
            raise _OutOfMemoryError
        return losses

    def _is_short_anywhere(self, is_short: bool) -> bool:
        return self._run.fabric.strategy.reduce_boolean_decision(is_short, all=False)

    def _fits(self, number: int, losses: list[Tensor | Loss | NoLoss | None]) -> bool:
        """Run forward and backward of a micro-batch; return whether there was memory for it."""
        is_extra = number >= len(self._micro_batches)
        one = self._micro_batches[-1 if is_extra else number]
        try:
            if is_extra:
                self._run_extra(one)
            else:
                loss = self._forward(one.batch, number)
                self._counts.end_forward()
                losses.append(loss)
                self._backward(loss)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            if not _has_parts(one.batch):
                error.add_note(
                    "Loopwright: on_oom='shrink' cannot split this micro-batch: it has one sample, or tensors without "
                    f"a common first dimension. To fix it: {_ELSE}"
                )
                raise
            error.__traceback__ = error.__context__ = error.__cause__ = None  # whose frames hold the attempt's tensors
            return False
        return True

    def _run_extra(self, one: MicroBatch) -> None:
        """Take part in a pass of ranks with more micro-batches, with a loss of weight 0."""
        before = Drawn.of(self._run)
        loss = self._run_muted(one.batch, one.offset)
        self._counts.end_forward()
        self._plan.backward(loss * 0)
        before.restore(self._run)

    def _run_muted(self, batch: Any, offset: int) -> Tensor:
        """Return the loss of a pass whose values are not logged: a mean, or a sum."""
        metrics = self._run.metrics
        was_muted, metrics.is_muted, metrics.table = metrics.is_muted, True, self._plan.table
        try:
            loss = read_loss(self._plan.training_step(batch, self._first + offset))
        finally:
            metrics.is_muted, metrics.table = was_muted, metrics.nowhere
        assert loss is not None, "sharded parameters need a loss on each rank"
        return loss.sum if isinstance(loss, Loss) else loss

    def _rejoin(self, one: MicroBatch, strategy: RejoinsPasses) -> None:
        """Take part in the pass that the other ranks are in, on fewer samples of the micro-batch."""
        counts, batch = self._counts, one.batch
        while True:
            counts.stop()
            self._forget()
            batch = split_batch(batch, 2)[0][0]
            loss: Tensor | None = None
            try:
                with strategy.skip_collectives(counts.forward):
                    loss = self._run_muted(batch, one.offset)
                if self._run.window_loss.form is None:
                    self._compare_forms(None)
                counts.end_forward()
                with strategy.skip_collectives(counts.backward):
                    self._plan.backward(loss)
                return
            except Exception as error:
                if not is_out_of_memory(error) or not _has_parts(batch):
                    raise
                error.__traceback__ = error.__context__ = error.__cause__ = None


def _has_parts(batch: object) -> bool:
    return batch is not NO_BATCH and (find_batch_size(batch) or 1) > 1


class _Counts:
    """The collectives of one micro-batch on this rank, which it must not repeat when it rejoins the others.

    Args:
        strategy: Counts them; None if passes do not communicate.

    Attributes:
        forward: Collectives of the forward pass, by process group, once the pass is stopped.
        backward: Collectives of the backward pass.
    """

    def __init__(self, strategy: RejoinsPasses | None) -> None:
        self._count: Callable[[], dict[str, int]] = dict if strategy is None else strategy.count_collectives
        self._began = self._count()
        self._ended: dict[str, int] | None = None
        self._began_backward: dict[str, int] | None = None
        self.forward: dict[str, int] = {}
        self.backward: dict[str, int] = {}

    def end_forward(self) -> None:
        """Note that the forward pass is over."""
        self._ended = self._count() if self._ended is None else self._ended

    def begin_backward(self) -> None:
        """Note that what ranks compare between the two passes is over."""
        self._began_backward = self._count()

    def stop(self) -> None:
        """Count up to here."""
        now = self._count()
        self.forward = _difference(now if self._ended is None else self._ended, self._began)
        began = self._began_backward or self._ended
        self.backward = {} if began is None else _difference(now, began)


def _difference(after: Mapping[str, int], before: Mapping[str, int]) -> dict[str, int]:
    return {name: count - before.get(name, 0) for name, count in after.items()}


class _Logged:
    """What the hooks of training have logged so far, to be restored after an attempt."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._steps = dict(metrics.step_accumulators)
        tables = [table for table in map(metrics.table_of, metrics.hooks) if table.stage == "train"]
        self._tables = [(one, dict(one)) for table in tables for one in table.by_loader.values()]
        known = {one: None for _, kept in self._tables for one in kept.values()}
        self._values = [(one, _values_of(one)) for one in known]

    def restore(self) -> None:
        """Restore it."""
        self._metrics.step_accumulators = dict(self._steps)
        for accumulators, kept in self._tables:
            accumulators.clear()
            accumulators.update(kept)
        for one, values in self._values:
            for name, value in values.items():
                setattr(one, name, copy(value))


def _values_of(accumulator: ScalarAccumulator) -> dict[str, Any]:
    """Return what `log` changes; its lists are copied, its tensors are replaced and never changed."""
    names = (
        "values", "weights", "version", "total", "total_weight", "is_empty", "look_at", "shapes",
        "window", "step", "step_values", "step_weights", "step_version",
    )  # fmt: skip
    return {name: value if isinstance(value := getattr(accumulator, name), Tensor) else copy(value) for name in names}


# --- set-up ----------------------------------------------------------------------------------------------------------


def bind_shrinking(trainer: TrainerView, run: FitRun, *, syncs_norms: bool) -> None:
    """Let the windows of a run be repeated in smaller parts where memory runs out.

    Args:
        trainer: Its arguments are checked.
        run: Its plan is set up, and is changed here.
        syncs_norms: Whether batch norms see the batches of all ranks.

    Raises:
        ConfigError: They cannot be repeated; the message says why.
    """
    _refuse(trainer, run, syncs_norms=syncs_norms)
    plan = run.plan
    plan.hold, plan.looks_ahead = ShrinkingWindow, False
    take_step = plan.take_step
    plan.take_step = _stepping_again(lambda optimizer, _: take_step(optimizer), run.device)
    for managed in run.managed:  # which a module's own `optimizer_step` steps
        assert managed.take_step is not None
        managed.take_step = _stepping_again(managed.take_step, run.device)


def _refuse(trainer: TrainerView, run: FitRun, *, syncs_norms: bool) -> None:
    strategy, traits = run.fabric.strategy, run.fabric.strategy.traits
    name = type(strategy).__name__
    reason = None
    if not run.is_automatic:
        reason = "manual optimization, where the module decides what a window is"
    elif run.optimizers and evaluates_again(run.optimizers[0]):
        reason = f"{type(run.optimizers[0]).__name__}, which evaluates a window within its step"
    elif trainer.accumulate_across_epochs:
        reason = "accumulate_across_epochs=True, whose windows cannot be repeated from their beginning"
    elif traits.has_stages:
        reason = "pipeline stages, whose micro_batches= are fixed before a window"
    elif traits.model_axes:
        axes = ", ".join(traits.model_axes)
        reason = f"the axes {axes} of a mesh, along which ranks exchange activations within a pass"
    elif traits.owns_optimizers or traits.traces_lazily:
        reason = f"{name}, whose engine runs the passes itself"
    elif run.has_ranks and syncs_norms:
        reason = "sync_batchnorm=True, with which ranks exchange statistics within a pass"
    elif run.has_ranks and not isinstance(strategy, RejoinsPasses):
        if not traits.averages_after_backward:
            reason = f"{name}, which cannot average gradients after the backward passes"
        elif traits.accumulation_refusal is not None:
            reason = f"{name}, because {traits.accumulation_refusal[0]}"
    if reason is not None:
        raise ConfigError(f"on_oom='shrink' with {reason}.", fix="leave out one of the two.")


def _stepping_again(take_step: TakeStep, device: torch.device) -> Callable[..., bool]:
    """Return a step that is repeated, with the memory that is free by then, if memory ran out before any change."""

    def step(optimizer: Optimizer, closure: Closure | None = None) -> bool:
        known = {id(parameter) for parameter in optimizer.state}
        tensors = [*parameters_of(optimizer), *_states_of(optimizer)]
        versions = [one._version for one in tensors]
        try:
            return take_step(optimizer, closure)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            if [one._version for one in tensors] != versions:
                error.add_note(
                    f"Loopwright: {type(optimizer).__name__} had changed parameters or states when memory ran out, so "
                    "that on_oom='shrink' cannot repeat the step. Resume from the last checkpoint."
                )
                raise
            error.__traceback__ = error.__context__ = error.__cause__ = None
        for part in getattr(optimizer, "parts", (optimizer,)):
            for parameter in [one for one in part.state if id(one) not in known]:
                del part.state[parameter]
        free_memory(device)
        logger.warning("Out of memory in the step of %s: it is made again.", type(optimizer).__name__)
        return take_step(optimizer, closure)

    return step


def _states_of(optimizer: Optimizer) -> list[Tensor]:
    return [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
