"""The evaluation loop: validation (inside fit or alone), test and prediction."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from ...data.move import move_to_device
from ...messages import warn
from ...protocols import Batch, StepFunction, StepOutput
from ...strategies.optional import stages_of
from ..checkpointing.snapshot import note_row_of_validation
from ..run import Run
from .eval_in_step import in_step
from .eval_loader import EvalLoader


class EvalLoop:
    """Evaluates all loaders of a stage.

    Args:
        stage: "validation", "test" or "predict".
        transfer: (batch, dataloader_idx) -> batch on the device.
        step: The module's step; called with dataloader_idx only when there are several loaders.
        context: Autograd mode of steps, of their hooks and of those before them: inference mode or no_grad.
        log_every_n_steps: Number of batches between two rows of step values.

    Attributes:
        begin: Returns the loaders to read, given the run and its loaders, before the hooks of the evaluation.
        log_step: Sends the step values of the present batch to the loggers.
        transfer, log_every_n_steps: As given.
    """

    def __init__(
        self,
        stage: str,
        *,
        transfer: Callable[[Batch, int], Batch],
        step: StepFunction,
        context: Callable[[], AbstractContextManager[object]],
        log_every_n_steps: int,
    ) -> None:
        self.stage = stage
        self.transfer = transfer
        self._step = step
        self._context = context
        self.log_every_n_steps = log_every_n_steps
        self.begin: Callable[[Run, EvalLoader], EvalLoader] = _begin
        self.log_step: Callable[[Run], None] = _log_step

    def run(self, run: Run, data: EvalLoader, *, keep: bool = False) -> list[list[StepOutput]]:
        """Evaluate.

        Args:
            run: The run.
            data: Loaders and limits.
            keep: Whether to return what the steps returned, on the CPU.

        Returns:
            The kept outputs, a list for each loader.
        """
        stage, life, module = self.stage, run.lifecycle, run.module
        if data.is_off:
            return [[] for _ in data.loaders]
        if run.stop_points is not None:
            run.stop_points.begin_phase()
        data = self.begin(run, data)
        modes = [(child, child.training) for child in module.modules()]
        outputs: list[list[StepOutput]] = [[] for _ in data.loaders]
        with torch.no_grad():
            context = self._context() if data.loaders else nullcontext()
            with context:
                # Within the context: a module that needs gradients in its steps enables them there.
                (life.own(f"on_{stage}_model_eval") or module.eval)()
                getattr(life, f"on_{stage}_start")()
                getattr(life, f"on_{stage}_epoch_start")()
                run.metrics.begin_evaluation()
                self._batches(run, data, outputs if keep else None)
            run.metrics.batch = run.metrics.sized = None
            if run.stop_points is not None:
                run.stop_points.end_evaluation()
            if stage != "predict":
                run.metrics.select_loader(stage, 0, several=len(data.loaders) > 1)
                run.metrics.publish_epoch(stage, run.progress.steps)
            getattr(life, f"on_{stage}_epoch_end")()
            run.metrics.end_evaluation(stage)
            getattr(life, f"on_{stage}_end")()
        # There is no on_predict_model_train; each submodule gets its earlier mode back after prediction, too.
        own = life.own(f"on_{stage}_model_train") if stage != "predict" else None
        if own is not None:
            own()
        else:
            _restore_modes(modes)
        return outputs

    def _batches(self, run: Run, data: EvalLoader, outputs: list[list[StepOutput]] | None) -> None:
        stage, life, metrics = self.stage, run.lifecycle, run.metrics
        on_start, on_end = (
            getattr(life, name) if life.does_anything(name) else None
            for name in (f"on_{stage}_batch_start", f"on_{stage}_batch_end")
        )
        progress, run_signals, stop_points = run.progress, run.run_signals, run.stop_points
        logs_steps = stage != "predict" and not run.trainer.sanity_checking
        every, send = self.log_every_n_steps, self.log_step
        transfer, step, nowhere = self.transfer, self._step, metrics.nowhere
        table = metrics.table_of(f"{stage}_step")
        several = len(data.loaders) > 1
        cpu = torch.device("cpu")
        strategy = run.fabric.strategy
        windows_before = metrics.window
        sizes_of_training = metrics.sizes
        is_together = run.has_ranks and strategy.traits.shards_parameters
        stages = stages_of(strategy)
        is_muted = stages is not None and not stages.has_last_stage
        metrics.step = progress.steps
        for dataloader_idx, batches in data:
            metrics.select_loader(stage, dataloader_idx, several=several)
            metrics.sizes = data.sizes_of(dataloader_idx)
            if is_together:
                batches = in_step(batches, run, data.count_of(dataloader_idx))
            batches = life.bracketed_items(batches, f"[EvalLoop].{stage}_next")
            record = data.records.get(dataloader_idx)
            if record is not None:
                batches = record.following(batches)
            for batch_idx, host_batch in enumerate(batches):
                metrics.batch = batch = transfer(host_batch, dataloader_idx)
                metrics.sized = None
                metrics.window += 1
                if on_start is not None:
                    on_start(batch, batch_idx, dataloader_idx)
                metrics.table = table
                if is_muted:
                    metrics.is_muted = True
                output = step(batch, batch_idx, dataloader_idx) if several else step(batch, batch_idx)
                if is_muted:
                    metrics.is_muted = False
                metrics.table = nowhere
                if on_end is not None:
                    on_end(output, batch, batch_idx, dataloader_idx)
                if outputs is not None:
                    outputs[dataloader_idx].append(move_to_device(output, cpu))
                if logs_steps:
                    progress.eval_batches += 1
                    if every and progress.eval_batches % every == 0 and metrics.has_step_values:
                        send(run)
                if is_together:
                    pass  # a rank that stopped here would leave the others waiting; all stop after the evaluation
                elif stop_points is not None:
                    stop_points.within_phase()
                elif run_signals.requested is not None:
                    run_signals.check()
        metrics.sizes = sizes_of_training
        if metrics.window == windows_before and any(data.limits) and not run.has_ranks:
            warn(f"The {stage} data has no batches: nothing was evaluated")


def _begin(run: Run, data: EvalLoader) -> EvalLoader:
    data.announce_epoch(run.progress.epochs)
    return data


def _log_step(run: Run) -> None:
    """Send the step values of this batch to the loggers."""
    row, _ = run.metrics.read_step(on_all_ranks=False)  # ranks may have different numbers of batches
    if row:
        note_row_of_validation(run)
        run.trainer.log_metrics(row, step=run.progress.eval_batches - 1)


def _restore_modes(modes: list[tuple[nn.Module, bool]]) -> None:
    for module, was_training in modes:
        module.training = was_training
