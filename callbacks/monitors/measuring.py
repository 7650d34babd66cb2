"""When monitors log: due steps, due batches of an evaluation, and the requirement of a logger."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...errors import ConfigError

if TYPE_CHECKING:
    from ...trainer import Trainer
    from ..base import Callback


def require_logger(trainer: Trainer, callback: Callback) -> None:
    """Refuse a run without a logger.

    Raises:
        ConfigError: The trainer has no logger, and this is not a `fast_dev_run`.
    """
    if not trainer.loggers and not trainer.fast_dev_run:
        raise ConfigError(
            f"{type(callback).__name__} has no logger to write to.",
            fix="pass Trainer(logger=...), or remove the callback.",
        )


class LogSteps:
    """The training steps that a callback logs. A skipped step has the number of the one before and is left out."""

    def __init__(self) -> None:
        self._step = -1

    def start(self, trainer: Trainer) -> None:
        """Begin after the current step: a resumed run logged it already."""
        self._step = trainer.global_step

    def is_due(self, trainer: Trainer, every_n_steps: int) -> bool:
        """Whether the current step is to be logged; once per step, at the end of its last micro-batch."""
        step = trainer.global_step
        if not trainer.at_step_boundary or not every_n_steps or step % every_n_steps or step == self._step:
            return False
        self._step = step
        return True


def is_evaluation_due(trainer: Trainer) -> bool:
    """Return whether the present batch of an evaluation is to be logged; False without `log_every_n_steps`."""
    every = trainer.log_every_n_steps
    return bool(every) and (trainer.progress.eval_batches + 1) % every == 0
