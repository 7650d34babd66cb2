"""`Trainer(max_samples=, max_tokens=)`: limits on samples and tokens, reached on all ranks at the same step.

The counts are global, over all ranks. With several ranks, each knows only its own count. They exchange counts when a
limit may be reached and not before: a step takes at most as much as its micro-batches can hold, so that the number of
steps that cannot reach the limit is known. That takes a handful of messages per run.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ...data.tokens import count_tokens
from ...errors import DataError, ModuleError
from ...fabric.global_batch import micro_batch_size
from ...protocols import Batch, Loaders

if TYPE_CHECKING:
    from ..run import FitRun
    from ..view import TrainerView

# Assumed factor by which a step can exceed the largest one so far, where the size of steps is not bounded.
_MARGIN = 2


class DataLimits:
    """Limits on samples and tokens during one fit.

    Args:
        trainer: Its limits apply.
        run: Its plan is set up: batches are counted on their way to the device.
    """

    def __init__(self, trainer: TrainerView, run: FitRun) -> None:
        self._trainer = trainer
        self._run = run
        self._progress = run.progress
        self._metrics = run.metrics
        self._strategy = run.fabric.strategy
        self._has_ranks = run.has_ranks
        self._max_samples, self._max_tokens = trainer.max_samples, trainer.max_tokens
        self._tokens = 0  # of the window under way
        self._window = -1
        self._largest = (0, 0)  # samples and tokens of this rank's largest step
        self._steps_left = 1  # until counts are exchanged
        self._epoch = -1
        self._count_tokens: Callable[[Batch], object] = getattr(run.module, "count_tokens", count_tokens)

    def counting(self, transfer: Callable[[Batch], Batch]) -> Callable[[Batch], Batch]:
        """Return the function that moves a batch to the device, which then counts it, too."""

        def move(batch: Batch) -> Batch:
            if self._max_tokens is not None:
                self._count(batch)
            moved = transfer(batch)
            if self._max_samples is not None and self._trainer._lw_batch_size_of(moved) is None:
                raise DataError(
                    f"max_samples={self._max_samples} needs the number of samples of each batch, and a "
                    f"{type(moved).__name__} does not show it: its tensors differ in their first dimension.",
                    fix="let all tensors of a batch have the samples in dimension 0, or limit steps with max_steps.",
                )
            return moved

        return move

    def _count(self, batch: Batch) -> None:
        count = self._count_tokens(batch)
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise ModuleError(
                f"count_tokens returned {count!r}, expected a whole number >= 0.",
                fix="return an int from shapes or from tensors on the host, such as int(mask.sum()).",
            )
        if self._window != self._metrics.window:  # a window that was dropped does not count
            self._window, self._tokens = self._metrics.window, 0
        self._tokens += count

    def end_window(self, samples: int) -> None:
        """Count a finished window; communicates when a limit may be reached. On every rank, after each window."""
        progress = self._progress
        tokens = self._tokens if self._window == self._metrics.window else 0
        progress.tokens += tokens
        if not self._has_ranks:
            self._judge(progress.samples, progress.tokens)
            return
        self._largest = (max(self._largest[0], samples), max(self._largest[1], tokens))
        self._steps_left -= 1
        if self._steps_left <= 0 or self._epoch != progress.epochs:  # a new epoch may have another batch size
            self._epoch = progress.epochs
            self._exchange()

    def _exchange(self) -> None:
        trainer, progress, topology = self._trainer, self._progress, self._strategy.topology
        own = (progress.samples - progress.samples_before, progress.tokens - progress.tokens_before, *self._largest)
        everywhere = self._strategy.topology.reports(self._strategy.gather_objects(own))
        sums = [sum(column) for column in zip(*everywhere, strict=True)]
        copies = len(everywhere) // topology.data_size  # ranks that train on the same samples
        samples, tokens, most_samples, most_tokens = (count // copies for count in sums)
        samples += progress.samples_before
        tokens += progress.tokens_before
        self._judge(samples, tokens)
        micro = micro_batch_size(trainer.train_dataloader)
        if micro is None:
            most_samples *= _MARGIN
        else:
            most_samples = micro * trainer.fit_loop.accumulation_for_epoch(progress.epochs) * topology.data_size
        left = [
            _steps_that_may_pass(limit, count, most)
            for limit, count, most in (
                (self._max_samples, samples, most_samples),
                (self._max_tokens, tokens, most_tokens * _MARGIN),
            )
            if limit is not None
        ]
        self._steps_left = min(left)

    def _judge(self, samples: int, tokens: int) -> None:
        carried = self._run.carried
        if carried is not None and carried.count:
            return  # no step was made: the window continues in the next epoch
        if is_reached(self._trainer, samples, tokens):
            self._trainer.fit_loop.is_used_up = True


def is_reached(trainer: TrainerView, samples: int, tokens: int) -> bool:
    """Return whether this number of samples or tokens reaches a limit."""
    return (trainer.max_samples is not None and samples >= trainer.max_samples) or (
        trainer.max_tokens is not None and tokens >= trainer.max_tokens
    )


def _steps_that_may_pass(limit: int, count: int, most: int) -> int:
    """Return after how many more steps of at most this size the limit can be reached at the earliest."""
    return max(1, math.ceil((limit - count) / most)) if most > 0 else 1


def steps_until_max_samples(trainer: TrainerView, num_batches: int | float, epochs: int) -> int | float:
    """Return how many steps a training from its start takes to reach `max_samples`; infinity where that is not known.

    Args:
        trainer: Its loaders are open.
        num_batches: Batches of an epoch on one rank; infinity where that is unknown.
        epochs: The limit on epochs, -1 for none.
    """
    left: int | None = trainer.max_samples
    micro = micro_batch_size(trainer.train_dataloader)
    if left is None or micro is None or not num_batches:
        return math.inf
    ranks = trainer.strategy.topology.data_size
    in_epoch: int | float = num_batches * micro * ranks
    if not math.isinf(num_batches):
        in_epoch = min(in_epoch, _size_of_data(trainer.train_dataloader))  # the last batch may be smaller
    scheduler = trainer.accumulation_scheduler
    if trainer.accumulate_across_epochs and not math.isinf(in_epoch):
        whole, rest = divmod(left, int(in_epoch))
        batches = whole * num_batches + math.ceil(rest / (micro * ranks))
        return math.ceil(batches / trainer.accumulate_grad_batches)
    steps = epoch = 0
    if scheduler is None and left > in_epoch:  # whole epochs at once
        epoch, left = divmod(left, int(in_epoch))
        steps = epoch * math.ceil(num_batches / trainer.accumulate_grad_batches)
    while left and (epochs == -1 or epoch < epochs):
        accumulate = (
            trainer.accumulate_grad_batches if scheduler is None else scheduler.get_accumulate_grad_batches(epoch)
        )
        if left <= in_epoch:
            return steps + math.ceil(left / (micro * accumulate * ranks))
        steps += math.ceil(num_batches / accumulate)
        left -= int(in_epoch)
        epoch += 1
    return steps


def _size_of_data(loader: Loaders) -> int | float:
    dataset: Any = getattr(loader, "dataset", None)
    try:
        return len(dataset)
    except (AttributeError, TypeError, NotImplementedError):
        return math.inf


def batches_until_limit(trainer: TrainerView) -> int | float:
    """Return how many more micro-batches `max_samples` leaves to each rank; infinity where that is not known."""
    micro = micro_batch_size(trainer.train_dataloader)
    most: int | None = trainer.max_samples
    if most is None or micro is None:
        return math.inf
    accumulate = trainer.accumulate_grad_batches
    in_step = micro * accumulate * trainer.strategy.topology.data_size
    return math.ceil(max(0, most - trainer._lw_samples_of_all_ranks()) / in_step) * accumulate
