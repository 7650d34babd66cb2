"""`StopFile`: stops training when a file appears."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import ConfigError
from ...remote import local_dir
from ..base import AnyModule, Callback

if TYPE_CHECKING:
    from ...protocols import AnyBatch, AnyOutput
    from ...trainer import Trainer

_log = logging.getLogger(__name__)


class StopFile(Callback):
    """Stop training when a file appears: `touch STOP`.

    The callback sets `trainer.should_stop`: all ranks end at the same step, `min_epochs` and `min_steps` are respected,
    and `fit` returns normally. Rank 0 removes the file, so that it does not stop the next run; a file that exists when
    training begins is removed with a warning.

    Args:
        path: Path of the file; None: `STOP` in the trainer's `default_root_dir`, or in the working directory if
            that is a URL.
        interval_s: Minimum number of seconds between two checks, which cost a system call each.

    Raises:
        ConfigError: `interval_s` is negative.
    """

    hears_every_step = True

    def __init__(self, path: str | os.PathLike[str] | None = None, *, interval_s: float = 1.0) -> None:
        if interval_s < 0:
            raise ConfigError(f"StopFile: interval_s={interval_s} is negative.", fix="pass 0 or more seconds.")
        self.path = None if path is None else Path(path).expanduser()
        self.interval_s = interval_s
        self._lw_file: Path | None = None
        self._lw_look_at_s = float("inf")

    def on_train_start(self, trainer: Trainer, pl_module: AnyModule) -> None:
        """Remove a file that an earlier run left behind."""
        self._lw_look_at_s = float("inf")
        if not trainer.is_global_zero:
            return
        self.stop_reason = None
        self._lw_file = self.path or Path(local_dir(trainer.default_root_dir), "STOP")
        if self._lw_remove():
            _log.warning("StopFile: %s existed before training began and is removed.", self._lw_file)
        self._lw_look_at_s = time.monotonic()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: AnyModule, outputs: AnyOutput, batch: AnyBatch, batch_idx: int
    ) -> None:
        """Check for the file."""
        now_s = time.monotonic()
        if now_s < self._lw_look_at_s:
            return
        self._lw_look_at_s = now_s + self.interval_s
        if self._lw_remove():
            _log.warning("StopFile: %s was found: training stops.", self._lw_file)
            self.stop_reason = f"{self._lw_file} was found"
            self._lw_look_at_s = float("inf")
            trainer.should_stop = True  # the ranks synchronize on the step

    def _lw_remove(self) -> bool:
        """Remove the file and return whether it was there."""
        assert self._lw_file is not None
        if not self._lw_file.exists():
            return False
        try:
            self._lw_file.unlink(missing_ok=True)
        except OSError as error:
            _log.warning("StopFile: %s cannot be removed (%s): it will stop the next run, too.", self._lw_file, error)
        return True
