"""What `callback_metrics` and the progress bar have, as in Lightning."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from ....callbacks.monitors import learning_rate_monitor
from ....protocols import AnyBatch, AnyOutput
from ....trainer.behavior import Behavior
from ....trainer.checkpointing.snapshot import note_row_of_validation
from ....trainer.hooks import Hook
from ....trainer.loop.eval_loader import EvalLoader
from ....trainer.loop.eval_loop import EvalLoop
from ....trainer.metrics.accumulators import with_suffix
from ....trainer.metrics.current_values import CurrentValues
from ....trainer.run import Run
from ....trainer.session.session import Session
from ....trainer.trainer import Trainer
from ..metrics import LightningMetrics

__all__ = [
    "LearningRateMonitor",
    "forget_metrics",
    "forget_restored_metrics",
    "keep_one_key",
    "keep_step_values",
    "log_after_training",
    "log_each_evaluation_step",
    "show_latest",
    "show_one_key",
]


def forget_metrics(run: Run) -> None:
    """Let each verb begin without metrics."""
    metrics = run.metrics
    metrics.results.clear()
    metrics.result_steps.clear()
    metrics.progress_bar.clear()
    metrics.newest_bar.clear()
    run.output.latest.clear()
    for accumulator in metrics.step_accumulators:
        accumulator.step_values, accumulator.step_weights, accumulator.step_version = [], [], 0


def forget_restored_metrics(run: Run) -> None:
    """Let a fit begin without the metrics of the checkpoint, or of the fit before."""
    forget_metrics(run)
    for accumulator in run.metrics.accumulators("train"):
        accumulator.reset()


def show_latest(trainer: Trainer) -> None:
    """Let the bar's metrics be those of the latest step, which is read now."""
    metrics = trainer.parts.metrics
    for accumulator in metrics.step_accumulators:
        if accumulator.prog_bar and accumulator.window == metrics.window and accumulator.step_values:
            value = accumulator.step_value(metrics.device)
            number = float(value.item()) if isinstance(value, Tensor) else float(value)
            metrics.show(number, accumulator.step_key)


def show_one_key(behavior: Behavior) -> Behavior:
    """Let a value that is logged by step and by epoch be in the bar's metrics under the two keys, not under its own."""
    return replace(behavior, current_values=_OneKey)


def keep_one_key(trainer: Trainer) -> None:
    """Let a value be kept for the bar under the first of its keys; see `show_one_key`."""
    metrics = trainer.parts.metrics
    assert isinstance(metrics, LightningMetrics)
    metrics.shows_first_key = True


class _OneKey(CurrentValues):
    """Leaves out the name of a value that has one for the step, too."""

    def read(self) -> dict[str, float]:
        """Return the values, by their key of a step."""
        found = super().read()
        return {name: value for name, value in found.items() if with_suffix(name, "_step") not in found}


def log_after_training(run: Run) -> None:
    """Let the rows of an evaluation stand at the step after the last one that this Trainer has trained."""
    progress = run.progress
    run.output.records_at = (progress.steps + 1, progress.epochs)


def keep_step_values(run: Run) -> None:
    """Let the rows of training have each value of the epoch's steps, also where a later step did not log it."""
    metrics = run.metrics
    began_at = [metrics.window]

    def at_epoch_start(fire: Hook) -> Hook:
        def on_train_epoch_start() -> None:
            began_at[0] = metrics.window
            fire()

        return on_train_epoch_start

    def at_batch_end(fire: Hook) -> Hook:
        def on_train_batch_end(*arguments: object) -> None:
            if run.at_boundary:
                for accumulator in metrics.accumulators("train"):
                    is_of_epoch = began_at[0] < accumulator.window < metrics.window
                    if accumulator.on_step and accumulator.step_values and is_of_epoch:
                        accumulator.window = metrics.window
            fire(*arguments)

        return on_train_batch_end

    run.lifecycle.wrap("on_train_epoch_start", at_epoch_start)
    run.lifecycle.wrap("on_train_batch_end", at_batch_end)


def log_each_evaluation_step(behavior: Behavior) -> Behavior:
    """Let each batch of an evaluation have a row of its step values; its step counts the batches of its loader."""
    return replace(behavior, evaluation_loop=partial(_counting_loop, behavior.evaluation_loop))


def _counting_loop(
    make: Callable[[Session, str, EvalLoader], EvalLoop], session: Session, stage: str, data: EvalLoader
) -> EvalLoop:
    loop = make(session, stage, data)
    # Stage -> its loaders and the batches that were counted; of one verb.
    seen: dict[str, tuple[EvalLoader, Counter[int]]] = vars(session).setdefault("counted_batches", {})
    if stage not in seen or seen[stage][0] is not data:  # loaders that are made again are counted again
        seen[stage] = (data, Counter())
    counts, present = seen[stage][1], [0]
    transfer = loop.transfer

    def transfer_noting(batch: AnyBatch, dataloader_idx: int) -> AnyBatch:
        present[0] = dataloader_idx
        if session.state.stage != "sanity_check":
            counts[dataloader_idx] += 1
        return transfer(batch, dataloader_idx)

    def log_step(run: Run) -> None:
        row, _ = run.metrics.read_step(on_all_ranks=False)
        if row:
            note_row_of_validation(run)
            run.trainer.log_metrics(row, step=counts[present[0]] - 1)

    loop.transfer, loop.log_every_n_steps, loop.log_step = transfer_noting, 1, log_step
    return loop


class LearningRateMonitor(learning_rate_monitor.LearningRateMonitor):
    """Logs rates at the beginning of a batch, also while gradients accumulate, and puts them into `callback_metrics`.

    Args:
        logging_interval, log_momentum, log_weight_decay: See `loopwright.LearningRateMonitor`.
    """

    def on_train_start(self, trainer: Trainer, pl_module: nn.Module) -> None:
        """Find optimizers, schedules and their names."""
        super().on_train_start(trainer, pl_module)
        scheduled = {id(getattr(config.scheduler, "optimizer", None)) for config in trainer.lr_scheduler_configs}
        if self.logging_interval is None:
            # Optimizers without a schedule are logged at both.
            free = [(name, one) for name, one in self._lw_watched["step"] if id(one) not in scheduled]
            self._lw_watched["epoch"] = [*self._lw_watched["epoch"], *free]

    def on_train_batch_start(self, trainer: Trainer, pl_module: nn.Module, batch: AnyBatch, batch_idx: int) -> None:
        """Log the rates before the step, if this step is logged."""
        if trainer.should_log and self._lw_watched["step"]:
            self._lw_send(trainer, self._lw_values(self._lw_watched["step"]), trainer.progress.steps)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: nn.Module) -> None:
        """Log what is counted by epochs: the rates that the epoch begins with."""
        if self._lw_watched["epoch"]:
            self._lw_send(trainer, self._lw_values(self._lw_watched["epoch"]), trainer.progress.steps)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: nn.Module, outputs: AnyOutput, batch: AnyBatch, batch_idx: int
    ) -> None:
        """Do nothing."""

    def _lw_send(self, trainer: Trainer, values: dict[str, float], step: int) -> None:
        super()._lw_send(trainer, values, step)
        metrics = trainer.parts.metrics
        for key, value in values.items():
            metrics.results[key] = torch.tensor(value, device=metrics.device)
            metrics.result_steps[key] = trainer.progress.steps
            trainer.parts.output.latest.pop(key, None)  # `logged_metrics` has what modules log
