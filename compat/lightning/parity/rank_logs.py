"""Logged values and loggers of several processes as in Lightning: each rank has its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ....trainer.hooks import Hook
from ....trainer.metrics.accumulators import MetricAccumulator, ScalarAccumulator, version_of
from ....trainer.metrics.ranks_metrics import RanksMetrics
from ....trainer.run import Run

__all__ = ["OwnRanksMetrics", "keep_own_values", "reduce_each_step", "tell_all_ranks"]


class OwnRanksMetrics(RanksMetrics):
    """Exchanges values as `RanksMetrics` does; then each rank keeps its own of what was logged without `sync_dist`.

    With it, a mean is the ranks' sums over the ranks' weights, each averaged in its own dtype.
    """

    def publish_epoch(self, stage: str, step: int) -> None:
        """Publish the values of an epoch."""
        super().publish_epoch(stage, step)
        metrics, known = self._metrics, self._epochs[stage].known
        for accumulator in metrics.filled_accumulators(stage):
            if isinstance(accumulator, MetricAccumulator):
                continue
            if accumulator.sync_dist and not accumulator.rank_zero_only:
                key = accumulator.hook, accumulator.name
                shares = [theirs[key] for theirs in known if key in theirs]
                pairs = [(share.total, share.weight) for share in shares]
                value: Tensor | None = averaged(accumulator, pairs).to(metrics.device)
            else:
                value = accumulator.epoch_value(metrics.device)
            if value is not None:
                metrics.put(value, step, accumulator.epoch_key, accumulator.name)


def averaged(accumulator: ScalarAccumulator, pairs: list[tuple[float, float]]) -> Tensor:
    """Return a value of all ranks from their totals and weights, with the rounding of an all-reduce."""
    totals = [torch.tensor(total, dtype=accumulator.dtype) for total, _ in pairs]
    total = totals[0]
    for other in totals[1:]:
        if accumulator.reduce in ("mean", "sum"):
            total = total + other
        else:
            total = torch.minimum(total, other) if accumulator.reduce == "min" else torch.maximum(total, other)
    if accumulator.reduce != "mean":
        return total
    weights = [weight for _, weight in pairs]
    is_whole = all(float(weight).is_integer() for weight in weights)
    weight = sum(weights) // len(pairs) if is_whole else sum(weights) / len(pairs)  # a mean of integers is cut off
    return total / len(pairs) / weight


def keep_own_values(run: Run) -> None:
    """Let each rank have the epoch values that it logged itself."""
    metrics = run.metrics
    if metrics.ranks is None or run.fabric.strategy.traits.has_stages:
        return
    rank, size = metrics.place
    metrics.ranks = OwnRanksMetrics(metrics, metrics.ranks.gather, rank=rank, size=size, module=run.module)


def reduce_each_step(run: Run) -> None:
    """Reduce step values with `sync_dist=True` over ranks at each batch."""
    if not run.has_ranks or run.fabric.strategy.traits.has_stages:
        return
    metrics, reduce = run.metrics, run.fabric.strategy.all_reduce

    def around(fire: Hook) -> Hook:
        def on_train_batch_end(*arguments: object) -> None:
            for accumulator in metrics.step_accumulators:
                is_synced = accumulator.sync_dist and not accumulator.rank_zero_only
                if is_synced and accumulator.window == metrics.window and accumulator.step_values:
                    value = accumulator.step_value(metrics.device)
                    tensor = value.clone() if isinstance(value, Tensor) else torch.tensor(value, device=metrics.device)
                    common = reduce(tensor, reduce_op=accumulator.reduce)
                    accumulator.step_values, accumulator.step_weights = [common], [1.0]
                    accumulator.step_version = version_of(common)
                    accumulator.synchronized, accumulator.synchronized_window = common, accumulator.window
            fire(*arguments)

        return on_train_batch_end

    run.lifecycle.wrap("on_train_batch_end", around)


def tell_all_ranks(run: Run) -> None:
    """Let loggers of the program's own be called on every rank; the others write on rank 0 only."""
    output = run.output
    if not run.has_ranks or not output.is_silent:
        return
    output.told_here = [one for one in output.loggers if not _writes_on_rank_zero(one)]


def _writes_on_rank_zero(logger: Any) -> bool:  # Any: any object with `log_metrics`
    """Whether a logger is Loopwright's, or a program's logger whose `log_metrics` is."""
    return str(getattr(type(logger).log_metrics, "__module__", "")).startswith("loopwright.")
