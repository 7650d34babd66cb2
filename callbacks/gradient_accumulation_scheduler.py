"""`GradientAccumulationScheduler`: the number of micro-batches per step, by epoch."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..errors import ArgumentTypeError, ConfigError
from .base import AnyModule, Callback

if TYPE_CHECKING:
    from ..trainer import Trainer


class GradientAccumulationScheduler(Callback):
    """Change the number of micro-batches per optimizer step at given epochs.

    Args:
        scheduling: Epoch (from 0) -> micro-batches per step from this epoch on; 1 before the first of these epochs.

    Attributes:
        scheduling: The argument, with an entry for epoch 0.
        epochs: The epochs of `scheduling`, ascending.

    Raises:
        ConfigError: `scheduling` is empty, an epoch is below 0, or a number is below 1. At the start of fit:
            optimization is manual, or `Trainer(accumulate_grad_batches=...)` was passed too.
    """

    def __init__(self, scheduling: Mapping[int, int]) -> None:
        super().__init__()
        if not isinstance(scheduling, Mapping) or not scheduling:
            raise ArgumentTypeError(
                f"GradientAccumulationScheduler expected {{epoch: micro-batches per step}}, got {scheduling!r}.",
                fix="pass for example {0: 8, 4: 4, 8: 1}.",
            )
        wrong = [f"epoch {epoch!r}" for epoch in scheduling if not _is_int(epoch, minimum=0)]
        wrong += [f"{factor!r} micro-batches" for factor in scheduling.values() if not _is_int(factor, minimum=1)]
        if wrong:
            raise ConfigError(
                f"GradientAccumulationScheduler: scheduling has {', '.join(wrong)}.",
                fix="epochs are integers from 0, micro-batches per step are integers from 1.",
            )
        self.scheduling = {0: 1, **scheduling}
        self.epochs = sorted(self.scheduling)
        self._lw_last_set: int | None = None

    def going_to_accumulate_grad_batches(self) -> bool:
        """Whether any epoch takes more than one micro-batch per step."""
        return any(factor > 1 for factor in self.scheduling.values())

    def get_accumulate_grad_batches(self, epoch: int) -> int:
        """Return the micro-batches per step in this epoch (from 0)."""
        return self.scheduling[self.epochs[bisect_right(self.epochs, epoch) - 1]]

    def setup(self, trainer: Trainer, pl_module: AnyModule, stage: str) -> None:
        """Refuse invalid combinations before anything runs."""
        if stage != "fit":
            return
        if getattr(pl_module, "automatic_optimization", True) is False:
            raise ConfigError(
                "GradientAccumulationScheduler with manual optimization: the module decides itself when to step.",
                fix="remove the callback, or set automatic_optimization = True.",
            )
        if trainer.global_batch_size is not None:
            raise ConfigError(
                f"Trainer(global_batch_size={trainer.global_batch_size}) and a GradientAccumulationScheduler were both "
                "given.",
                fix="keep one of the two.",
            )
        if trainer.accumulate_grad_batches not in (1, self._lw_last_set):
            raise ConfigError(
                f"Trainer(accumulate_grad_batches={trainer.accumulate_grad_batches}) and a "
                "GradientAccumulationScheduler were both given.",
                fix="keep one of the two.",
            )

    def on_train_start(self, trainer: Trainer, pl_module: AnyModule) -> None:
        """Set the number for the epoch that the run starts or resumes in."""
        self._lw_set(trainer)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: AnyModule) -> None:
        """Set the number for this epoch."""
        self._lw_set(trainer)

    def _lw_set(self, trainer: Trainer) -> None:
        self._lw_last_set = self.get_accumulate_grad_batches(trainer.current_epoch)
        trainer.accumulate_grad_batches = self._lw_last_set


def _is_int(value: int | str, *, minimum: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= minimum
