"""`LearningRateFinder`: the learning-rate search (tuner/lr_find.py) as a callback."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from torch import nn

from ..data import DataModule
from ..errors import ConfigError
from ..messages import warn
from .base import AnyModule, Callback, find_state

if TYPE_CHECKING:
    from ..protocols import StateDict
    from ..trainer import Trainer
    from ..tuner.lr_curve import LearningRateCurve

_log = logging.getLogger(__name__)


class LearningRateFinder(Callback):
    """Search for a learning rate when fit begins, and train with it.

    The search trains a copy and leaves no trace. A resumed run uses the rate that the first run found. To search at
    other moments, override `on_train_epoch_start` and call `lr_find` there.

    Args:
        min_lr: First learning rate of the search.
        max_lr: Last learning rate of the search.
        num_training_steps: Number of optimizer steps of the search.
        mode: How the rate increases, "exponential" or "linear".
        early_stop_threshold: Multiple of the lowest smoothed loss at which the search stops; None: never.
        update_attr: Whether to train with the suggested rate: the attribute or hyperparameter is set before
            optimizers and schedules are created.
        attr_name: Name of the attribute or hyperparameter; "" uses `lr` or `learning_rate`.

    Attributes:
        optimal_lr: The loss curve with its suggestion; None before the search.

    Raises:
        ConfigError: An argument is invalid. At the start of fit: several optimizers with manual optimization, or the
            attribute is missing.
    """

    SUPPORTED_MODES = ("linear", "exponential")
    runs_first = True

    def __init__(
        self,
        min_lr: float = 1e-8,
        max_lr: float = 1,
        num_training_steps: int = 100,
        mode: str = "exponential",
        early_stop_threshold: float | None = 4.0,
        update_attr: bool = True,
        attr_name: str = "",
    ) -> None:
        from ..tuner.lr_find import check_search  # not imported by those who use other callbacks

        check_search(
            min_lr=min_lr, max_lr=max_lr, num_training=num_training_steps, mode=mode,
            early_stop_threshold=early_stop_threshold,
        )  # fmt: skip
        self._lw_range = (mode, min_lr, max_lr, num_training_steps)
        self._lw_threshold = early_stop_threshold
        self._update_attr = update_attr
        self._attr_name = attr_name
        self._lw_found: tuple[str, float] | None = None
        self.optimal_lr: LearningRateCurve | None = None

    @property
    def state_key(self) -> str:
        """Name of the state in a checkpoint: the range and the attribute distinguish instances."""
        return self._generate_state_key(range=self._lw_range, attr_name=self._attr_name)

    def state_dict(self) -> StateDict:
        """Return the curve and the setting."""
        if self.optimal_lr is None:
            return {}
        return {
            "curve": self.optimal_lr.state_dict(),
            "found": None if self._lw_found is None else list(self._lw_found),
        }

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Restore the result of an earlier run."""
        from ..tuner.lr_curve import LearningRateCurve

        self.optimal_lr = LearningRateCurve.from_state(state_dict["curve"])
        found = state_dict["found"]
        self._lw_found = None if found is None else (found[0], found[1])

    def on_load_checkpoint(self, trainer: Trainer, pl_module: AnyModule, checkpoint: StateDict) -> None:
        """Set the learning rate that the saved run found, before optimizers are created."""
        states = checkpoint.get("callbacks", {})
        state = states.get(find_state(states, self.state_key))
        if trainer.state.fn == "fit" and state:
            self.load_state_dict(state)
            self.write_found(trainer, (pl_module, trainer.datamodule))

    def write_found(self, trainer: Trainer, owners: tuple[nn.Module | DataModule | None, ...]) -> None:
        """Set the learning rate that was found earlier, before a checkpoint or in the processes that trained.

        Args:
            trainer: Not used.
            owners: Module and data module; None for one that does not exist.
        """
        from ..tuner.setting import write_setting

        if self._lw_found is not None and self._update_attr:
            write_setting(owners, *self._lw_found)

    def on_fit_start(self, trainer: Trainer, pl_module: AnyModule) -> None:
        """Search, unless training has started already."""
        if trainer.fast_dev_run:
            warn("LearningRateFinder does nothing with fast_dev_run")
            return
        if trainer.progress.total_batches or trainer.ckpt_path is not None:
            if self.optimal_lr is None and trainer.is_global_zero:
                _log.info("LearningRateFinder: training has started already, and keeps its learning rate.")
            return
        self.lr_find(trainer, pl_module)

    def lr_find(self, trainer: Trainer, pl_module: AnyModule) -> None:
        """Search, and train with the rate found. Call it on every rank, before or between epochs."""
        from ..tuner.lr_curve import LearningRateCurve
        from ..tuner.lr_find import find_learning_rate, name_of_rate, set_learning_rate
        from ..tuner.trial import Subject

        if not trainer.at_step_boundary or trainer.progress.epoch_open:
            raise ConfigError(
                "LearningRateFinder.lr_find was called within an epoch, where the training data is being read.",
                fix="call it in on_fit_start or on_train_epoch_start.",
            )
        make = trainer.behavior.learning_rate_curve or LearningRateCurve
        subject = Subject.of_run(trainer, is_set_up=True)
        name = name_of_rate(subject, self._attr_name) if self._update_attr else None
        curve = find_learning_rate(subject, make(*self._lw_range), self._lw_threshold)
        self.optimal_lr = curve
        lr = curve.suggestion()
        if lr is not None and name is not None:
            self._lw_found = (name, lr)
            set_learning_rate(subject, name, lr)
            if trainer.is_global_zero:
                _log.info("LearningRateFinder: %s is set to %.4g.", name, lr)
