"""The callbacks that a Trainer adds to the user's: progress bar, model summary, checkpoints, time limit."""

from __future__ import annotations

from ..callbacks import Callback, Checkpoint, GradientAccumulationScheduler
from ..errors import ConfigError
from .arguments import Arguments

__all__ = ["default_callbacks"]


def default_callbacks(arguments: Arguments, own: list[Callback]) -> list[Callback]:
    """Return the callbacks that the arguments ask for and the user did not pass.

    Raises:
        ConfigError: An argument and a callback contradict each other.
    """
    # not imported before a Trainer is made
    from ..callbacks import ModelCheckpoint, ModelSummary, ProgressBar, RichModelSummary, RichProgressBar, Timer

    def has(kind: type) -> bool:
        return any(isinstance(callback, kind) for callback in own)

    problems: list[str] = []
    if not arguments.enable_checkpointing and has(Checkpoint):
        problems.append("enable_checkpointing=False, and a checkpoint callback is passed")
    bars = [type(callback).__name__ for callback in own if isinstance(callback, ProgressBar)]
    if len(bars) > 1:
        problems.append(f"several progress bars are passed: {', '.join(bars)}")
    if bars and not arguments.enable_progress_bar:
        problems.append(f"enable_progress_bar=False, and {bars[0]} is passed")
    if has(GradientAccumulationScheduler) and arguments.accumulate_grad_batches != 1:
        problems.append("accumulate_grad_batches and GradientAccumulationScheduler are both given")
    if has(GradientAccumulationScheduler) and arguments.global_batch_size is not None:
        problems.append("global_batch_size and GradientAccumulationScheduler are both given")
    if problems:
        raise ConfigError(f"Trainer: {'; '.join(problems)}.", fix="leave out one of each pair.")
    added: list[Callback] = []
    if arguments.enable_progress_bar and not bars:
        added.append(RichProgressBar())
    if arguments.enable_model_summary and not has(ModelSummary):
        added.append(RichModelSummary())
    if arguments.max_time is not None and not has(Timer):
        added.append(Timer(duration=arguments.max_time, interval="step"))
    if arguments.enable_checkpointing and not has(Checkpoint) and not arguments.fast_dev_run:
        added.append(ModelCheckpoint())
    return added
