"""`BatchSizeFinder`: the batch-size search (tuner/batch_size.py) as a callback."""

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

_log = logging.getLogger(__name__)


class BatchSizeFinder(Callback):
    """Search for the largest batch size that fits into memory at the start of fit, validate, test or predict.

    The search trains copies and leaves no trace. A resumed fit uses the size that the first run found. To search at
    other moments of fit, override `on_train_epoch_start` and call `scale_batch_size` there.

    Args:
        mode: "power" doubles the size until memory is exhausted; "binsearch" then bisects.
        steps_per_trial: Number of steps of each trial.
        init_val: First batch size.
        max_trials: Maximum number of sizes to try.
        batch_arg_name: Name of the attribute or hyperparameter that the loaders read their batch size from.
        margin: For "binsearch", fraction of the found size that is left free if memory was the limit.
        max_val: Largest size to try; the number of samples is another limit.
        keep_global_batch: Whether the number of samples per step stays the same. The size then divides the current
            one times `accumulate_grad_batches`, which is increased accordingly; results differ by rounding only.

    Attributes:
        optimal_batch_size: The found size; `init_val` before the search.

    Raises:
        ConfigError: An argument is invalid. At the start: loaders were passed directly, the attribute does not exist,
            or no size fits.
    """

    SUPPORTED_MODES = ("power", "binsearch")
    runs_first = True

    def __init__(
        self,
        mode: str = "power",
        steps_per_trial: int = 3,
        init_val: int = 2,
        max_trials: int = 25,
        batch_arg_name: str = "batch_size",
        margin: float = 0.05,
        max_val: int = 8192,
        *,
        keep_global_batch: bool = False,
    ) -> None:
        from ..tuner.batch_size import Search  # not imported by those who use other callbacks

        self._lw_search = Search(
            mode, steps_per_trial, init_val, max_trials, batch_arg_name, margin, max_val, keep_global_batch
        )  # fmt: skip
        self.optimal_batch_size = init_val
        self._lw_accumulate: int | None = None
        self._lw_has_searched = False

    @property
    def state_key(self) -> str:
        """Name of the state in a checkpoint: the attribute distinguishes instances."""
        return self._generate_state_key(batch_arg_name=self._lw_search.batch_arg_name)

    def state_dict(self) -> StateDict:
        """Return the result of the search."""
        if not self._lw_has_searched:
            return {}
        return {"optimal_batch_size": self.optimal_batch_size, "accumulate_grad_batches": self._lw_accumulate}

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Restore the result of an earlier run."""
        self.optimal_batch_size = state_dict["optimal_batch_size"]
        self._lw_accumulate = state_dict["accumulate_grad_batches"]
        self._lw_has_searched = True

    def on_load_checkpoint(self, trainer: Trainer, pl_module: AnyModule, checkpoint: StateDict) -> None:
        """Set the batch size that the saved run found, before the loaders are opened."""
        states = checkpoint.get("callbacks", {})
        state = states.get(find_state(states, self.state_key))
        if trainer.state.fn == "fit" and state:
            self.load_state_dict(state)
            self.write_found(trainer, (pl_module, trainer.datamodule))

    def write_found(self, trainer: Trainer, owners: tuple[nn.Module | DataModule | None, ...]) -> None:
        """Set the batch size that fit found earlier, before a checkpoint or in the processes that trained.

        Args:
            trainer: Its `accumulate_grad_batches` is set with `keep_global_batch`.
            owners: Module and data module; None for one that does not exist.
        """
        from ..tuner.setting import write_setting

        if self._lw_has_searched:
            write_setting(owners, self._lw_search.batch_arg_name, self.optimal_batch_size)
            if self._lw_accumulate is not None:
                trainer.accumulate_grad_batches = self._lw_accumulate

    def setup(self, trainer: Trainer, pl_module: AnyModule, stage: str) -> None:
        """Search for validate, test and predict, whose loaders are opened after this."""
        if stage != "fit":
            self._lw_search_unless_trial(trainer, stage, is_set_up=False)

    def on_fit_start(self, trainer: Trainer, pl_module: AnyModule) -> None:
        """Search for fit, unless training has started already."""
        if trainer.progress.total_batches or trainer.ckpt_path is not None:
            if not self._lw_has_searched and trainer.is_global_zero:
                _log.info("BatchSizeFinder: training has started already, and keeps its batch size.")
            return
        self._lw_search_unless_trial(trainer, "fit", is_set_up=True)

    def _lw_search_unless_trial(self, trainer: Trainer, method: str, *, is_set_up: bool) -> None:
        if trainer.fast_dev_run:
            warn("BatchSizeFinder does nothing with fast_dev_run")
            return
        self._lw_find(trainer, method, is_set_up=is_set_up)

    def scale_batch_size(self, trainer: Trainer, pl_module: AnyModule) -> None:
        """Search within fit, and train with the size found. Call it on every rank, before or between epochs."""
        if not trainer.at_step_boundary or trainer.progress.epoch_open:
            raise ConfigError(
                "BatchSizeFinder.scale_batch_size was called within an epoch, where the training data is being read.",
                fix="call it in on_fit_start or on_train_epoch_start.",
            )
        self._lw_find(trainer, "fit", is_set_up=True)

    def _lw_find(self, trainer: Trainer, method: str, *, is_set_up: bool) -> None:
        from ..tuner.batch_size import find_batch_size_that_fits, set_batch_size
        from ..tuner.trial import Subject

        subject = Subject.of_run(trainer, is_set_up=is_set_up)
        found = find_batch_size_that_fits(subject, method, self._lw_search)
        set_batch_size(subject, method, self._lw_search.batch_arg_name, found)
        self.optimal_batch_size = found.size
        if method == "fit":
            self._lw_has_searched, self._lw_accumulate = True, found.accumulate_grad_batches
        if trainer.is_global_zero:
            _log.info("BatchSizeFinder: %s is set to %d.", self._lw_search.batch_arg_name, found.size)
