"""When a bar draws and what: the hooks that the tqdm and the rich bar share. Not used by itself.

Between two drawings a batch costs one look at the clock. Everything is drawn by the main thread, at most ten times a
second, from values that are on the host already.
"""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ...errors import ConfigError
from .base import ProgressBar, printed
from .plain import PlainLines
from .terminal import can_draw

if TYPE_CHECKING:
    from torch import nn

    from ...protocols import AnyBatch, AnyOutput
    from ...trainer.trainer import Trainer

__all__ = ["LiveProgressBar"]

_log = logging.getLogger(__name__)
_NEVER = math.inf
_DRAW_INTERVAL_S = 0.1
# The first drawing imports the drawing library. Before the first training step (a trial validation) it starts only
# after this time.
_PATIENCE_S = 0.5


class LiveProgressBar(ProgressBar):
    """Draw on a terminal or in a notebook; elsewhere write lines.

    Subclasses implement `_show`, `_close` and `_write_above`.

    Args:
        plain_interval_s: Seconds between two lines if the output is not a terminal. Lines are also written after the
            first step and at the end of each epoch and validation.
    """

    def __init__(self, *, plain_interval_s: float = 30.0) -> None:
        super().__init__()
        if not plain_interval_s > 0:
            raise ConfigError(
                f"{type(self).__name__}: plain_interval_s={plain_interval_s!r}, expected seconds above 0.",
                fix="pass for example 30.0.",
            )
        self._plain_interval_s = plain_interval_s
        self._is_enabled = True
        self._has_failed = False
        self._lines: PlainLines | None = None
        self._next_draw_s = 0.0
        self._open: set[str] = set()
        self._eval_start_s = 0.0
        self._has_lined = False

    # --- what subclasses provide -----------------------------------------------------------------------------------

    def _show(
        self, stage: str, description: str, done: int, total: int | None, metrics: dict[str, float | int | str]
    ) -> None:
        """Draw the bar of the stage ("train", "sanity", "validation", "test", "predict"); open it if it is not."""
        raise NotImplementedError

    def _close(self, stage: str, *, keep: bool) -> None:
        """Take the bar of the stage off the screen, or leave its last state there."""
        raise NotImplementedError

    def _write_above(self, text: str) -> None:
        """Write text above the bars that are on the screen."""
        raise NotImplementedError

    @property
    def _leaves(self) -> bool:
        """Whether the bar of each epoch stays on the screen."""
        return False

    # --- what users call -------------------------------------------------------------------------------------------

    @property
    def is_enabled(self) -> bool:
        """Whether it draws."""
        return self._is_enabled

    @property
    def is_disabled(self) -> bool:
        """Whether it draws nothing."""
        return not self._is_enabled

    def disable(self) -> None:
        """Draw nothing from now on."""
        self._is_enabled = False
        self._next_draw_s = _NEVER

    def enable(self) -> None:
        """Draw again."""
        self._is_enabled = True
        self._next_draw_s = 0.0

    def print(self, *args: object, **kwargs: Any) -> None:  # Any: as print takes it
        """Write a line as `print` does, above the bars."""
        if kwargs.get("file") not in (None, sys.stdout):
            if self._trainer is None or self._trainer.is_global_zero:
                kwargs["file"].write(printed(*args, **kwargs))
        elif self._open and self._lines is None:
            self._safely(self._write_above, printed(*args, **kwargs))
        else:
            super().print(*args, **kwargs)

    # --- hooks -----------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: nn.Module, stage: str) -> None:
        """Keep the trainer, and look where the output goes."""
        super().setup(trainer, pl_module, stage)
        self._lines = None if can_draw(sys.stdout) else PlainLines(self._write)
        self._open = set()
        self._arm(0.0)

    def on_sanity_check_start(self, trainer: Trainer, pl_module: object) -> None:
        """A trial validation begins."""
        self._arm(_PATIENCE_S)

    def on_sanity_check_end(self, trainer: Trainer, pl_module: object) -> None:
        """Take the bar of the trial validation away."""
        self._finish("sanity")

    def on_train_start(self, trainer: Trainer, pl_module: object) -> None:
        """Training begins."""
        if self._lines is not None:
            self._safely(self._lines.start, trainer)
        self._has_lined = False
        self._arm(0.0)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: object) -> None:
        """Begin a new bar, if the one of the last epoch stays."""
        if self._leaves:
            self._finish("train", keep=True)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: nn.Module, outputs: AnyOutput, batch: AnyBatch, batch_idx: int
    ) -> None:
        """Draw if it is time."""
        if time.monotonic() >= self._next_draw_s:
            self._draw_training(trainer, pl_module, batch_idx + 1)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: object) -> None:
        """Draw the end of the epoch."""
        if self._is_enabled:
            total = self.total_train_batches
            done = trainer.progress.batches_in_epoch if math.isinf(total) else int(total)
            self._draw_training(trainer, pl_module, done)

    def on_train_end(self, trainer: Trainer, pl_module: object) -> None:
        """Leave the last state of the bar on the screen."""
        self._finish("train", keep=True)

    def on_validation_start(self, trainer: Trainer, pl_module: object) -> None:
        """A validation begins."""
        self._begin_evaluation(trainer.sanity_checking)

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: nn.Module,
        outputs: AnyOutput,
        batch: AnyBatch,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Draw if it is time."""
        if time.monotonic() >= self._next_draw_s:
            stage = "sanity" if trainer.sanity_checking else "validation"
            self._draw_evaluation(trainer, pl_module, stage, batch_idx + 1, dataloader_idx)

    def on_validation_end(self, trainer: Trainer, pl_module: object) -> None:
        """Take the bar away; write a line where lines are written, unless that of the epoch's end follows at once."""
        if trainer.sanity_checking:
            return
        if trainer.state.fn == "fit":
            self._finish("validation")
        else:
            self._complete(trainer, pl_module, "validation")
        if self._lines is not None and self._is_enabled:
            self._lines.pause(time.monotonic() - self._eval_start_s)
            if trainer.state.fn == "fit" and not trainer.is_last_batch:
                self._safely(self._write_training_line, trainer, pl_module)
            self._next_draw_s = time.monotonic() + self._plain_interval_s
        elif self._is_enabled and trainer.state.fn == "fit":
            self._next_draw_s = 0.0

    def on_test_start(self, trainer: Trainer, pl_module: object) -> None:
        """A test begins."""
        self._begin_evaluation(False)

    def on_test_batch_end(
        self,
        trainer: Trainer,
        pl_module: nn.Module,
        outputs: AnyOutput,
        batch: AnyBatch,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Draw if it is time."""
        if time.monotonic() >= self._next_draw_s:
            self._draw_evaluation(trainer, pl_module, "test", batch_idx + 1, dataloader_idx)

    def on_test_end(self, trainer: Trainer, pl_module: object) -> None:
        """Leave the last state of the bar on the screen."""
        self._complete(trainer, pl_module, "test")

    def on_predict_start(self, trainer: Trainer, pl_module: object) -> None:
        """A prediction begins."""
        self._begin_evaluation(False)

    def on_predict_batch_end(
        self,
        trainer: Trainer,
        pl_module: nn.Module,
        outputs: AnyOutput,
        batch: AnyBatch,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Draw if it is time."""
        if time.monotonic() >= self._next_draw_s:
            self._draw_evaluation(trainer, pl_module, "predict", batch_idx + 1, dataloader_idx)

    def on_predict_end(self, trainer: Trainer, pl_module: object) -> None:
        """Leave the last state of the bar on the screen."""
        self._complete(trainer, pl_module, "predict")

    def on_exception(self, trainer: Trainer, pl_module: nn.Module, exception: BaseException) -> None:
        """Leave the screen as the exception's text needs it."""
        self._finish_all()

    def teardown(self, trainer: Trainer, pl_module: nn.Module, stage: str) -> None:
        """Take down what is still open."""
        self._finish_all()

    # --- drawing ---------------------------------------------------------------------------------------------------

    def _arm(self, delay_s: float) -> None:
        if not self._is_enabled:
            return
        delay_s = max(delay_s, self._plain_interval_s) if self._lines is not None and delay_s else delay_s
        self._next_draw_s = time.monotonic() + delay_s

    def _begin_evaluation(self, is_sanity_check: bool) -> None:
        self.reset_dataloader_idx_tracker()
        self._eval_start_s = time.monotonic()
        if self._lines is not None and self._is_enabled:
            self._next_draw_s = self._eval_start_s + self._plain_interval_s
        elif not is_sanity_check:
            self._arm(0.0)

    def _draw_training(self, trainer: Trainer, module: object, done: int) -> None:
        if self._lines is not None:
            if self._has_lined or trainer.at_step_boundary:
                self._has_lined = True
                self._safely(self._write_training_line, trainer, module)
                self._next_draw_s = self._after(self._plain_interval_s)
            return
        epoch = f"{trainer.current_epoch + 1}"
        if trainer.max_epochs is not None and trainer.max_epochs > 0:
            epoch += f"/{trainer.max_epochs}"
        self._draw(trainer, module, "train", f"Epoch {epoch}", done, self.total_train_batches)

    def _write_training_line(self, trainer: Trainer, module: Any) -> None:
        if self._lines is not None:
            self._lines.training(trainer, self.get_metrics(trainer, module))

    def _draw_evaluation(self, trainer: Trainer, module: object, stage: str, done: int, dataloader_idx: int) -> None:
        description = {
            "sanity": self.sanity_check_description,
            "validation": self.validation_description,
            "test": self.test_description,
            "predict": self.predict_description,
        }[stage]
        batches = self._eval_batches("validation" if stage == "sanity" else stage)
        if len(batches) > 1:
            description += f" DataLoader {dataloader_idx}"
        if self.has_dataloader_changed(dataloader_idx) and self._lines is None:
            self._finish(stage)
        total = batches[dataloader_idx] if dataloader_idx < len(batches) else math.inf
        if self._lines is not None:
            self._safely(self._lines.evaluation, description, done, total, {})
            self._next_draw_s = self._after(self._plain_interval_s)
            return
        self._draw(trainer, module, stage, description, done, total)

    def _draw(self, trainer: Trainer, module: Any, stage: str, description: str, done: int, total: int | float) -> None:
        metrics = self._safely(self.get_metrics, trainer, module) or {} if stage == "train" else {}
        self._open.add(stage)
        self._safely(self._show, stage, description, done, None if math.isinf(total) else int(total), metrics)
        self._next_draw_s = self._after(_DRAW_INTERVAL_S)

    def _after(self, interval_s: float) -> float:
        return time.monotonic() + interval_s if self._is_enabled else _NEVER

    def _complete(self, trainer: Trainer, module: object, stage: str) -> None:
        """Leave the bar of an evaluation on the screen, full."""
        last = self._current_eval_dataloader_idx or 0
        batches = self._eval_batches(stage)
        if stage in self._open and last < len(batches) and not math.isinf(batches[last]):
            self._draw_evaluation(trainer, module, stage, int(batches[last]), last)
        self._finish(stage, keep=True)

    def _finish(self, stage: str, *, keep: bool = False) -> None:
        if stage in self._open:
            self._open.discard(stage)
            self._safely(self._close, stage, keep=keep)

    def _finish_all(self) -> None:
        for stage in ("sanity", "validation", "test", "predict", "train"):
            self._finish(stage, keep=stage in ("train", "test", "predict"))

    def _safely(self, draw: Callable[..., object], *args: object, **kwargs: object) -> object:
        """Draw; after a failure, log it and disable drawing. Training is not affected."""
        try:
            return draw(*args, **kwargs)
        except Exception:  # terminals and notebooks fail in their own ways, and a drawing is not worth a training
            if not self._has_failed:
                self._has_failed = True
                _log.exception("%s failed and is disabled; training continues.", type(self).__name__)
            self.disable()
            return None
