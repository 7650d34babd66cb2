"""`ProgressBar`, the base of progress bars: descriptions, totals and metrics."""

from __future__ import annotations

import logging
import math
import weakref
from typing import TYPE_CHECKING, Any

from ...errors import ModuleError
from ..base import AnyModule, Callback

if TYPE_CHECKING:
    from ...trainer import Trainer

_log = logging.getLogger(__name__)


class ProgressBar(Callback):
    """Base of progress bars: override hooks to draw, and `get_metrics` to choose the metrics.

    Its hooks run last, so that it shows values that were logged in the same hook.
    """

    runs_last = True

    def __init__(self) -> None:
        self._trainer: Trainer | None = None
        self._current_eval_dataloader_idx: int | None = None

    @property
    def trainer(self) -> Trainer:
        """The trainer of the run.

        Raises:
            ModuleError: No run has begun.
        """
        if self._trainer is None:
            raise ModuleError(f"{type(self).__name__}.trainer was read before a run began.", fix="read it in a hook.")
        if not isinstance(self._trainer, weakref.ProxyType):
            return self._trainer
        try:
            return self._trainer._lw_itself
        except ReferenceError:
            raise ModuleError(
                f"{type(self).__name__}.trainer was read after its Trainer was deleted.",
                fix="keep the Trainer in a variable.",
            ) from None

    @property
    def sanity_check_description(self) -> str:
        """Text beside the bar of the sanity check."""
        return "Sanity Checking"

    @property
    def train_description(self) -> str:
        """Text beside the bar of training."""
        return "Training"

    @property
    def validation_description(self) -> str:
        """Text beside the bar of a validation."""
        return "Validation"

    @property
    def test_description(self) -> str:
        """Text beside the bar of a test."""
        return "Testing"

    @property
    def predict_description(self) -> str:
        """Text beside the bar of a prediction."""
        return "Predicting"

    @property
    def total_train_batches(self) -> int | float:
        """Micro-batches in this epoch, up to `max_steps` and `max_samples`; inf if unknown."""
        trainer = self.trainer
        left: int | float = trainer._lw_batches_until_max_samples
        if trainer.max_steps != -1:
            left = min(left, (trainer.max_steps - trainer.global_step) * trainer.accumulate_grad_batches)
        return min(trainer.num_training_batches, trainer.progress.batches_in_epoch + left)

    @property
    def total_val_batches(self) -> int | float:
        """Batches of a validation over all loaders, or of the sanity check while it runs; inf if unknown.

        It is 0 in an epoch of fit without a validation.
        """
        trainer = self.trainer
        is_training = trainer.state.fn == "fit" and not trainer.sanity_checking
        if is_training and not trainer.fit_loop.validates_in_this_epoch:
            return 0
        return sum(self._lw_eval_batches("validation"))

    @property
    def total_val_batches_current_dataloader(self) -> int | float:
        """Batches of the loader that is being validated; inf if not known."""
        return self._lw_batches_of_current_loader("validation")

    @property
    def total_test_batches_current_dataloader(self) -> int | float:
        """Batches of the loader that is being tested; inf if not known."""
        return self._lw_batches_of_current_loader("test")

    @property
    def total_predict_batches_current_dataloader(self) -> int | float:
        """Batches of the loader that is being predicted; inf if not known."""
        return self._lw_batches_of_current_loader("predict")

    def has_dataloader_changed(self, dataloader_idx: int) -> bool:
        """Whether this loader differs from the loader of the last call."""
        before, self._current_eval_dataloader_idx = self._current_eval_dataloader_idx, dataloader_idx
        return before != dataloader_idx

    def reset_dataloader_idx_tracker(self) -> None:
        """Reset the loader that `has_dataloader_changed` compares with."""
        self._current_eval_dataloader_idx = None

    def disable(self) -> None:
        """Stop drawing. Override it."""
        raise NotImplementedError

    def enable(self) -> None:
        """Draw again. Override it."""
        raise NotImplementedError

    def print(self, *args: object, **kwargs: Any) -> None:  # Any: as print takes it
        """Write a line as `print` does, above the bar if one is drawn; on rank zero only."""
        if self._trainer is None or self._trainer.is_global_zero:
            self._lw_write(printed(*args, **kwargs))

    def _lw_write(self, text: str) -> None:
        print(text, end="", flush=True)  # noqa: T201  # also without a console, as pythonw

    def setup(self, trainer: Trainer, pl_module: AnyModule, stage: str) -> None:
        """Keep the trainer; only rank zero draws."""
        self._trainer = trainer
        if not trainer.is_global_zero:
            self.disable()

    def release_run(self) -> None:
        """Keep only a weak reference to the Trainer after its run."""
        if self._trainer is not None and not isinstance(self._trainer, weakref.ProxyType):
            self._trainer = weakref.proxy(self._trainer)

    def get_metrics(self, trainer: Trainer, pl_module: AnyModule) -> dict[str, float | int | str]:
        """Return the metrics to show next to the bar: the values logged with `prog_bar=True`. May be overridden.

        They are host values of the latest step if reading them does not wait, else of the last log boundary.
        """
        return {**trainer.progress_bar_metrics}

    def _lw_eval_batches(self, stage: str) -> list[int | float]:
        trainer = self.trainer
        if stage == "test":
            batches = trainer.num_test_batches
        elif stage == "predict":
            batches = trainer.num_predict_batches
        else:
            batches = trainer.num_sanity_val_batches if trainer.sanity_checking else trainer.num_val_batches
        return list(batches)

    def _lw_batches_of_current_loader(self, stage: str) -> int | float:
        batches, index = self._lw_eval_batches(stage), self._current_eval_dataloader_idx or 0
        return batches[index] if index < len(batches) else math.inf


def printed(*args: object, sep: str | None = " ", end: str | None = "\n", **_: object) -> str:
    """Return the text that `print` with these arguments would write."""
    return (" " if sep is None else sep).join(map(str, args)) + ("\n" if end is None else end)


def format_metrics(metrics: dict[str, float | int | str]) -> list[str]:
    """Return "name=value" for each metric, numbers with four significant digits."""
    return [f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}" for name, value in metrics.items()]
