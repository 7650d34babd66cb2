"""`Trainer(global_batch_size=)`: the accumulation that follows from the loader, and the line that fit logs about it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from ...callbacks import ModelSummary
from ...errors import ConfigError
from ...fabric.global_batch import accumulation_steps, describe_global_batch, micro_batch_size

if TYPE_CHECKING:
    from ..run import FitRun
    from ..view import TrainerView

logger = logging.getLogger(__name__)


def derive_accumulation(trainer: TrainerView, run: FitRun) -> int:
    """Return the micro-batches per step that make `global_batch_size`, for the loader that was just opened.

    On every rank: it communicates, once for each time that loaders are opened.

    Raises:
        ConfigError: The loader does not say its batch size, the ranks' differ, or the numbers do not divide.
    """
    strategy, loader = run.fabric.strategy, run.loaders.train
    wanted = trainer.global_batch_size
    assert wanted is not None
    micro = micro_batch_size(loader)
    if run.has_ranks:
        sizes = strategy.gather_objects(micro)
        if len(set(sizes)) > 1:
            listed = ", ".join(f"{size} on rank {rank}" for rank, size in enumerate(sizes))
            raise ConfigError(
                f"global_batch_size={wanted} needs the same batch size on all ranks, and the loaders have {listed}.",
                fix="build the loader with the same batch_size on every rank.",
            )
    return accumulation_steps(wanted, micro, strategy.topology.data_size, loader=loader)


def plan_accumulation(wanted: int, micro: int | None, data_size: int) -> int | None:
    """Return the result of `derive_accumulation`, before processes start; None if it is not known yet."""
    unit = 0 if micro is None else micro * data_size
    return wanted // unit if unit and not wanted % unit else None


def report_global_batch(trainer: TrainerView, run: FitRun) -> None:
    """Log once per fit, on rank zero, how many samples a step takes: below the model's summary, else in the log."""
    if not trainer._lw_reports_runs:
        return
    micro = micro_batch_size(run.loaders.train)
    accumulate = trainer.fit_loop.accumulation_for_epoch(trainer.progress.epochs)
    line = describe_global_batch(micro, accumulate, run.fabric.strategy.topology.data_size)
    if trainer.accumulation_scheduler is not None:
        line += f" in epoch {trainer.progress.epochs}"
    line = line[0].upper() + line[1:]
    if any(isinstance(callback, ModelSummary) and callback._max_depth for callback in trainer.callbacks):
        trainer.print(line)
    else:
        logger.info("%s", line)
