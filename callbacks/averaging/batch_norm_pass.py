"""Running statistics of batch norms for averaged weights, by a pass over the training data."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from ...data import NO_BATCH
from ...data.rng import capture_generators, capture_rng, find_generators, restore_generators, restore_rng
from ...errors import DataError
from ...protocols import Batch, StepFunction, StepOutput
from ..sharded_pass import gathered

if TYPE_CHECKING:
    from ...trainer import Trainer
    from ...trainer.run import FitRun

_log = logging.getLogger(__name__)


@torch.no_grad()
def renew_running_statistics(trainer: Trainer, module: nn.Module, norms: Sequence[Any]) -> None:
    """Set the statistics of batch norms to the mean over all training batches. It communicates: call it on every rank.

    The batches go through `training_step` as in training, without gradients; what it logs is not kept, and random
    number generators are restored. If the data cannot be read again, statistics stay as they are.

    Args:
        trainer: In fit, after the last step.
        module: The user's module, in training mode.
        norms: The batch norms; Any, because torch has no public name for their common class.
    """
    run = cast("FitRun", trainer.latest_run())
    before = [(norm.momentum, norm.running_mean.clone(), norm.running_var.clone()) for norm in norms]
    seen_before = [norm.num_batches_tracked.clone() for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # a mean over all batches rather than a moving one
    rng = capture_rng()
    try:
        _pass(trainer, run, module)
    finally:
        restore_rng(rng)
        for norm, (momentum, _, _) in zip(norms, before, strict=True):
            norm.momentum = momentum
    counts = [norm.num_batches_tracked.to(norm.running_mean.dtype) for norm in norms]
    if trainer.world_size > 1:
        counts = _combine(trainer, norms, counts)
    for norm, count, (_, mean, var), seen in zip(norms, counts, before, seen_before, strict=True):
        if not count:  # it has seen no batch
            norm.running_mean.copy_(mean)
            norm.running_var.copy_(var)
            norm.num_batches_tracked.copy_(seen)


def _pass(trainer: Trainer, run: FitRun, module: nn.Module) -> None:
    transfer, metrics, step = run.plan.transfer, run.metrics, _own_step(module)
    # As in training: the loader's generators must stay where training left them, for a run that continues.
    generators = find_generators(train=trainer.train_dataloader)
    states = capture_generators(generators)
    stream = trainer._lw_loaders.open_training()
    table, metrics.is_muted = metrics.table, True
    try:
        stream.open(trainer.current_epoch, trainer.strategy.broadcast(capture_rng()) if run.has_ranks else None)
        index = 0
        while stream.remaining(1):
            batch = stream.next_batch()
            if batch is not NO_BATCH:
                batch = transfer(batch)
                metrics.batch, metrics.table = batch, run.plan.table
                with trainer.fabric.autocast():
                    step(batch, index)
            index += 1
    except DataError as error:
        _log.warning("the statistics of batch norms are those of the weights before averaging: %s", error.what)
    finally:
        metrics.table, metrics.is_muted, metrics.batch = table, False, None
        stream.shut_down()
        restore_generators(generators, states)


def _own_step(module: nn.Module) -> Callable[[Batch, int], StepOutput]:
    """Return the module's own training_step: the strategy's would overwrite buffers with rank 0's."""
    step: StepFunction = module.training_step  # type: ignore[assignment]  # nn.Module knows tensors and modules
    kinds = [parameter.kind for parameter in inspect.signature(step).parameters.values()]
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if inspect.Parameter.VAR_POSITIONAL in kinds or sum(kind in positional for kind in kinds) > 1:
        return gathered(module, step)
    return gathered(module, lambda batch, _: step(batch))


def _combine(trainer: Trainer, norms: Sequence[Any], counts: list[Tensor]) -> list[Tensor]:
    """Set the mean over the batches of all ranks; return the number of these batches."""
    sums = [
        [norm.running_mean * count, norm.running_var * count, count]
        for norm, count in zip(norms, counts, strict=True)
    ]  # fmt: skip
    totals = trainer.strategy.all_reduce(sums, reduce_op="sum")
    for norm, (mean, var, count) in zip(norms, totals, strict=True):
        norm.running_mean.copy_(mean / count.clamp(min=1))
        norm.running_var.copy_(var / count.clamp(min=1))
        norm.num_batches_tracked.copy_(count.long())
    return [count for _, _, count in totals]
