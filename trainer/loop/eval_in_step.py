"""Evaluation in step on all ranks, where evaluation steps communicate.

Ranks have different numbers of batches, since every sample is read once. Ranks without a remaining batch take part in
the communication of the others' steps, without running the user's code.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ...errors import DataError
from ...strategies.optional import evaluation_of
from ..run import Run

_DONE = object()


def in_step(batches: Iterator[object], run: Run, global_batches: int | None) -> Iterator[object]:
    """Yield this rank's batches, then take part in the global batches in which only other ranks have one.

    Args:
        batches: The batches of one loader.
        run: The run.
        global_batches: Number of batches of the rank with the most; None if unknown.
    """
    strategy = run.fabric.strategy
    helper = evaluation_of(strategy)
    can_help = helper is None or helper.helps_in_evaluation
    known = strategy.gather_objects(global_batches if can_help else None)
    counts = [count for count in known if count is not None]
    if len(counts) < len(known):
        yield from _asking(batches, run)
        return
    done = 0
    for batch in batches:
        yield batch
        done += 1
    if helper is not None:
        for _ in range(max(counts) - done):
            helper.evaluate_without_data(run.model)


def _asking(batches: Iterator[object], run: Run) -> Iterator[object]:
    """Yield batches, and before each global batch ask whether any rank has one left."""
    strategy = run.fabric.strategy
    helper = evaluation_of(strategy)
    while True:
        batch = next(batches, _DONE)
        has_batch = batch is not _DONE
        is_stuck = not has_batch and helper is not None and not helper.helps_in_evaluation
        answer = strategy.all_reduce(torch.tensor([int(has_batch), int(is_stuck)]), reduce_op="sum")
        count, stuck = answer.tolist()
        if not count:
            return
        if stuck:
            raise DataError(
                f"{count} of {strategy.world_size} ranks have a batch in a global batch of an evaluation, and under "
                f"{type(strategy).__name__} a rank that never had one cannot take part in the others' steps.",
                fix="evaluate on at least as many batches as there are ranks (batch_size, limit_val_batches), or "
                "with a strategy whose parameters are whole, such as 'ddp' or 'deepspeed_stage_2'.",
            )
        if has_batch:
            yield batch
        elif helper is not None:
            helper.evaluate_without_data(run.model)
