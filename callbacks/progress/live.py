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
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast

from ...console import LINES, is_notebook
from ...errors import ConfigError
from ...lazy import is_core
from ..base import AnyModule, as_hook
from .base import ProgressBar, format_metrics, printed
from .plain import PlainLines
from .terminal import can_draw

if TYPE_CHECKING:
    from torch import nn

    from ...protocols import AnyBatch, AnyOutput
    from ...trainer import Trainer

_log = logging.getLogger(__name__)
_NEVER = math.inf
_DRAW_INTERVAL_S = 0.1
# The first drawing imports the drawing library. Before the first training step (a trial validation) it starts only
# after this time.
_PATIENCE_S = 0.5

P = ParamSpec("P")
R = TypeVar("R")


class LiveProgressBar(ProgressBar):
    """Draw on a terminal or in a notebook. Elsewhere write lines, and update the bars without drawing them.

    Subclasses implement `_lw_show`, `_lw_close` and `_lw_write_above`. A bar is created when it is first drawn or read.
    In a user's subclass, whose code may read it in other ways, a bar that is not drawn is created at the beginning of
    the stage.

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
        self._lw_plain_interval_s = plain_interval_s
        self._lw_is_enabled = True
        self._lw_has_failed = False
        self._lw_lines: PlainLines | None = None
        self._lw_next_draw_s = self._lw_next_line_s = 0.0
        self._lw_draw_interval_s = _DRAW_INTERVAL_S
        self._lw_is_watched = False
        self._lw_open: set[str] = set()
        self._lw_under_way: set[str] = set()
        self._lw_past: dict[str, tuple[str, int, int | float]] = {}  # stages whose bar was not read, as they ended
        self._lw_began: dict[str, tuple[float, int]] = {}  # stage -> when, and after how many batches
        self._lw_eval_start_s = 0.0
        self._lw_has_lined = False
        self._lw_train_start_s = 0.0
        self._lw_last_description = ""

    # --- what subclasses provide -----------------------------------------------------------------------------------

    def _lw_show(
        self, stage: str, description: str, done: int, total: int | None, metrics: dict[str, float | int | str]
    ) -> None:
        """Draw the bar of the stage ("train", "sanity", "validation", "test", "predict"); open it if it is not.

        Where `_lw_is_drawn` is false, only the bar's numbers and texts change.
        """
        raise NotImplementedError

    def _lw_close(self, stage: str, *, keep: bool) -> None:
        """Take the bar of the stage off the screen, or leave its last state there. It stays readable."""
        raise NotImplementedError

    def _lw_write_above(self, text: str) -> None:
        """Write text above the bars that are on the screen."""
        raise NotImplementedError

    @property
    def _lw_leaves(self) -> bool:
        """Whether the bar of each epoch stays on the screen."""
        return False

    @property
    def _lw_is_drawn(self) -> bool:
        """Whether bars can be seen."""
        return self._lw_lines is None and self._lw_is_enabled

    # --- what users call -------------------------------------------------------------------------------------------

    @property
    def is_enabled(self) -> bool:
        """Whether it draws."""
        return self._lw_is_enabled

    @property
    def is_disabled(self) -> bool:
        """Whether it draws nothing."""
        return not self._lw_is_enabled

    def disable(self) -> None:
        """Draw nothing from now on."""
        self._lw_is_enabled = False
        self._lw_next_draw_s = _NEVER

    def enable(self) -> None:
        """Draw again."""
        self._lw_is_enabled = True
        self._lw_next_draw_s = 0.0

    def print(self, *args: object, **kwargs: Any) -> None:  # Any: as print takes it
        """Write a line as `print` does, above the bars."""
        if kwargs.get("file") not in (None, sys.stdout):
            if self._trainer is None or self._trainer.is_global_zero:
                kwargs["file"].write(printed(*args, **kwargs))
        elif self._lw_open and self._lw_is_drawn:
            self._lw_safely(self._lw_write_above, printed(*args, **kwargs))
        else:
            super().print(*args, **kwargs)

    # --- hooks -----------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: AnyModule, stage: str) -> None:
        """Keep the trainer, and look where the output goes."""
        super().setup(trainer, pl_module, stage)
        self._lw_lines = None if can_draw(sys.stdout) else PlainLines(self._lw_write)
        self._lw_open, self._lw_under_way, self._lw_past = set(), set(), {}
        # A subclass of the user, or a method set on the object, may look at its bar after each batch; on a terminal
        # that would cost too much.
        is_replaced = any(
            callable(value) and callable(getattr(type(self), name, None)) for name, value in vars(self).items()
        )
        is_plain = is_core(type(self)) and not is_replaced
        self._lw_is_watched = self._lw_lines is not None and not is_plain
        self._lw_arm(0.0)

    def on_sanity_check_start(self, trainer: Trainer, pl_module: AnyModule) -> None:
        """The sanity check begins."""
        self._lw_arm(_PATIENCE_S)
        self._lw_begin("sanity")

    def on_sanity_check_end(self, trainer: Trainer, pl_module: AnyModule) -> None:
        """Take the bar of the sanity check away."""
        self._lw_finish("sanity")

    def on_train_start(self, trainer: Trainer, pl_module: AnyModule) -> None:
        """Training begins."""
        if self._lw_lines is not None:
            self._lw_safely(self._lw_lines.start, trainer)
        self._lw_has_lined = False
        self._lw_train_start_s = time.monotonic()
        self._lw_arm(0.0)
        self._lw_begin("train")

    def on_train_epoch_start(self, trainer: Trainer, pl_module: AnyModule) -> None:
        """Begin a new bar, if the one of the last epoch stays."""
        if self._lw_leaves:
            self._lw_finish("train", keep=True)
        self._lw_begin("train")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: AnyModule, outputs: AnyOutput, batch: AnyBatch, batch_idx: int
    ) -> None:
        """Draw if it is time."""
        if time.monotonic() >= self._lw_next_draw_s:
            self._lw_draw_training(trainer, pl_module, batch_idx + 1)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: AnyModule) -> None:
        """Draw the end of the epoch."""
        if self._lw_is_enabled:
            self._lw_next_line_s = 0.0
            total = self.total_train_batches
            done = trainer.progress.batches_in_epoch if math.isinf(total) else int(total)
            self._lw_draw_training(trainer, pl_module, done)

    def on_train_end(self, trainer: Trainer, pl_module: AnyModule) -> None:
        """Leave the last state of the bar on the screen; in a notebook also as text, which is saved with it."""
        self._lw_finish("train", keep=True)
        if self._lw_is_enabled and self._lw_lines is None and is_notebook():
            seconds = timedelta(seconds=round(time.monotonic() - self._lw_train_start_s))
            parts = [self._lw_last_description, f"step {trainer.global_step}", str(seconds)]
            shown = self._lw_safely(self.get_metrics, trainer, cast("nn.Module", pl_module))
            self._lw_write(
                " | ".join([*parts, *format_metrics(cast("dict[str, float | int | str]", shown or {}))]) + "\n"
            )

    def on_validation_start(self, trainer: Trainer, pl_module: AnyModule) -> None:
        """A validation begins; the bar of training shows where it stands."""
        if self._lw_is_drawn and "train" in self._lw_open and not trainer.sanity_checking:
            done = trainer.progress.batches_in_epoch
            self._lw_draw(trainer, pl_module, "train", self._lw_epoch_of(trainer), done, self.total_train_batches)
        self._lw_begin_evaluation("sanity" if trainer.sanity_checking else "validation")

    def on_validation_end(self, trainer: Trainer, pl_module: AnyModule) -> None:
        """Take the bar away; write a line where lines are written, unless that of the epoch's end follows at once."""
        if trainer.sanity_checking:
            return
        if trainer.state.fn == "fit":
            if self._lw_lines is not None:
                self._lw_fill(trainer, pl_module, "validation")
            self._lw_finish("validation")
            if self._lw_lines is not None and "train" in self._lw_open and self._lw_is_enabled:
                done = trainer.progress.batches_in_epoch
                self._lw_draw(trainer, pl_module, "train", self._lw_epoch_of(trainer), done, self.total_train_batches)
        else:
            self._lw_complete("validation", trainer, pl_module)
        if self._lw_lines is not None and self._lw_is_enabled:
            self._lw_lines.pause(time.monotonic() - self._lw_eval_start_s)
            if trainer.state.fn == "fit" and not trainer.is_last_batch:
                self._lw_safely(self._lw_write_training_line, trainer, pl_module)
            self._lw_next_draw_s = time.monotonic() + self._lw_plain_interval_s
        elif self._lw_is_enabled and trainer.state.fn == "fit":
            self._lw_next_draw_s = 0.0

    def _lw_start_evaluation(self, stage: str, trainer: Trainer, pl_module: AnyModule) -> None:
        """A test or prediction begins."""
        self._lw_begin_evaluation(stage)

    def _lw_evaluated(
        self,
        stage: str,
        trainer: Trainer,
        pl_module: AnyModule,
        outputs: AnyOutput,
        batch: AnyBatch,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Draw if it is time."""
        if time.monotonic() >= self._lw_next_draw_s:
            name = "sanity" if trainer.sanity_checking else stage
            self._lw_draw_evaluation(trainer, pl_module, name, batch_idx + 1, dataloader_idx)

    def _lw_complete(self, stage: str, trainer: Trainer, module: AnyModule) -> None:
        """Leave the bar of an evaluation on the screen, full."""
        self._lw_fill(trainer, module, stage)
        self._lw_finish(stage, keep=True)

    on_validation_batch_end = as_hook(_lw_evaluated, "validation")
    on_test_start, on_predict_start = as_hook(_lw_start_evaluation, "test"), as_hook(_lw_start_evaluation, "predict")
    on_test_batch_end, on_predict_batch_end = as_hook(_lw_evaluated, "test"), as_hook(_lw_evaluated, "predict")
    on_test_end, on_predict_end = as_hook(_lw_complete, "test"), as_hook(_lw_complete, "predict")

    def on_exception(self, trainer: Trainer, pl_module: AnyModule, exception: BaseException) -> None:
        """Leave the screen as the exception's text needs it."""
        self._lw_finish_all()

    def teardown(self, trainer: Trainer, pl_module: AnyModule, stage: str) -> None:
        """Take down what is still open."""
        self._lw_finish_all()

    # --- drawing ---------------------------------------------------------------------------------------------------

    def _lw_arm(self, delay_s: float) -> None:
        if not self._lw_is_enabled:
            return
        now_s = time.monotonic()
        self._lw_next_line_s = now_s + (max(delay_s, self._lw_plain_interval_s) if delay_s else 0.0)
        self._lw_next_draw_s = now_s + (delay_s if self._lw_lines is None else 0.0)

    def _lw_begin(self, stage: str) -> None:
        """Note that a stage is under way; where its bar is not drawn and may be looked at, make it now."""
        self._lw_under_way.add(stage)
        self._lw_began[stage] = time.monotonic(), self.trainer.progress.batches_in_epoch if stage == "train" else 0
        if not self._lw_is_drawn and not self._lw_waits_for_reader:
            self._lw_make_bar(stage)

    @property
    def _lw_waits_for_reader(self) -> bool:
        """Whether bars are made only when they are read: lines do not need the drawing library."""
        return self._lw_lines is not None and not self._lw_is_watched

    def _lw_make_bar(self, stage: str) -> None:
        """Make the bar of a stage that is under way or over, unless there is one."""
        if stage in self._lw_open or self._lw_has_failed:
            return
        if stage in self._lw_under_way:
            self._lw_open.add(stage)
            description, done, total = self._lw_state_of(stage)
        elif stage in self._lw_past:
            description, done, total = self._lw_past.pop(stage)
        else:
            return
        self._lw_safely(self._lw_show, stage, description, done, None if math.isinf(total) else int(total), {})

    def _lw_state_of(self, stage: str, *, is_over: bool = False) -> tuple[str, int, int | float]:
        """Return the description of a stage that is under way, the batches that are done, and their total."""
        if stage == "train":
            progress, total = self.trainer.progress, self.total_train_batches
            done = total if is_over and not progress.epoch_open and not math.isinf(total) else progress.batches_in_epoch
            number = self.trainer.current_epoch - (1 if is_over and not progress.epoch_open else 0)
            return self._lw_numbered(number, self.trainer), int(done), total
        batches = self._lw_eval_batches("validation" if stage == "sanity" else stage)
        total = batches[0] if batches else math.inf
        return self._lw_description_of(stage), int(total) if is_over and not math.isinf(total) else 0, total

    def _lw_begin_evaluation(self, stage: str) -> None:
        self.reset_dataloader_idx_tracker()
        self._lw_eval_start_s = time.monotonic()
        if self._lw_lines is not None and self._lw_is_enabled:
            self._lw_next_draw_s, self._lw_next_line_s = 0.0, self._lw_eval_start_s + self._lw_plain_interval_s
        elif stage != "sanity":
            self._lw_arm(0.0)
        self._lw_begin(stage)

    def _lw_epoch_of(self, trainer: Trainer) -> str:
        return self._lw_numbered(trainer.current_epoch, trainer)

    @staticmethod
    def _lw_numbered(epoch: int, trainer: Trainer) -> str:
        limit = trainer.fit_loop.epoch_limit
        return f"Epoch {epoch}/{limit - 1}" if limit > 0 else f"Epoch {epoch}"  # from 0, as in names of checkpoints

    def _lw_description_of(self, stage: str) -> str:
        return {
            "sanity": self.sanity_check_description,
            "validation": self.validation_description,
            "test": self.test_description,
            "predict": self.predict_description,
        }[stage]

    def _lw_is_line_due(self) -> bool:
        return self._lw_lines is not None and time.monotonic() >= self._lw_next_line_s

    def _lw_draw_training(self, trainer: Trainer, module: AnyModule, done: int) -> None:
        if self._lw_is_line_due() and (self._lw_has_lined or trainer.at_step_boundary):
            self._lw_has_lined = True
            self._lw_safely(self._lw_write_training_line, trainer, module)
            self._lw_next_line_s = self._lw_after(self._lw_plain_interval_s)
        self._lw_draw(trainer, module, "train", self._lw_epoch_of(trainer), done, self.total_train_batches)
        if self._lw_lines is not None and self._lw_is_enabled and not self._lw_has_lined:
            self._lw_next_draw_s = 0.0  # the first line comes at the end of the first window

    def _lw_write_training_line(self, trainer: Trainer, module: AnyModule) -> None:
        if self._lw_lines is not None:
            self._lw_lines.training(trainer, self.get_metrics(trainer, module))

    def _lw_draw_evaluation(
        self, trainer: Trainer, module: AnyModule, stage: str, done: int, dataloader_idx: int
    ) -> None:
        description = self._lw_description_of(stage)
        batches = self._lw_eval_batches("validation" if stage == "sanity" else stage)
        if len(batches) > 1:
            description += f" DataLoader {dataloader_idx}"
        if self.has_dataloader_changed(dataloader_idx) and self._lw_lines is None:
            self._lw_finish(stage)
        total = batches[dataloader_idx] if dataloader_idx < len(batches) else math.inf
        if self._lw_is_line_due():
            assert self._lw_lines is not None
            self._lw_safely(self._lw_lines.evaluation, description, done, total, {})
            self._lw_next_line_s = self._lw_after(self._lw_plain_interval_s)
        self._lw_draw(trainer, module, stage, description, done, total)

    def _lw_draw(
        self, trainer: Trainer, module: AnyModule, stage: str, description: str, done: int, total: int | float
    ) -> None:
        if stage == "train":
            self._lw_last_description = description
        if stage in self._lw_open or not self._lw_waits_for_reader:
            metrics = self._lw_safely(self.get_metrics, trainer, module) or {} if stage == "train" else {}
            self._lw_open.add(stage)
            if self._lw_is_drawn:
                LINES.above = self._lw_write_line
            self._lw_safely(self._lw_show, stage, description, done, None if math.isinf(total) else int(total), metrics)
        self._lw_next_draw_s = self._lw_after(0.0 if self._lw_is_watched else self._lw_draw_interval_s)

    def _lw_after(self, interval_s: float) -> float:
        return time.monotonic() + interval_s if self._lw_is_enabled else _NEVER

    def _lw_fill(self, trainer: Trainer, module: AnyModule, stage: str) -> None:
        """Bring the bar of an evaluation to its last batch."""
        last = self._current_eval_dataloader_idx or 0
        batches = self._lw_eval_batches(stage)
        if self._lw_is_enabled and stage in self._lw_open and last < len(batches) and not math.isinf(batches[last]):
            description = self._lw_description_of(stage) + (f" DataLoader {last}" if len(batches) > 1 else "")
            self._lw_draw(trainer, module, stage, description, int(batches[last]), batches[last])

    def _lw_finish(self, stage: str, *, keep: bool = False) -> None:
        if stage in self._lw_under_way and stage not in self._lw_open and self._lw_waits_for_reader:
            self._lw_past[stage] = self._lw_state_of(stage, is_over=True)
        self._lw_under_way.discard(stage)
        if stage in self._lw_open:
            self._lw_open.discard(stage)
            self._lw_safely(self._lw_close, stage, keep=keep)
            if not self._lw_open and LINES.above == self._lw_write_line:
                LINES.above = None

    def _lw_write_line(self, text: str) -> None:
        """Write a line of a log above the bars."""
        if self._lw_open and self._lw_is_drawn:
            self._lw_safely(self._lw_write_above, text)
        elif sys.stderr is not None:
            sys.stderr.write(text)

    def _lw_finish_all(self) -> None:
        for stage in ("sanity", "validation", "test", "predict", "train"):
            self._lw_finish(stage, keep=stage in ("train", "test", "predict"))

    def _lw_safely(self, draw: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R | None:
        """Draw; after a failure, log it and disable drawing. Training is not affected."""
        try:
            return draw(*args, **kwargs)
        except Exception:  # terminals and notebooks fail in their own ways, and a drawing is not worth a training
            if not self._lw_has_failed:
                self._lw_has_failed = True
                _log.exception("%s failed and is disabled; training continues.", type(self).__name__)
            self.disable()
            return None
