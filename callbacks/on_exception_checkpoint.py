"""A checkpoint of the moment in which training fails. Built by users."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from ..errors import CheckpointError, ConfigError
from .base import Checkpoint

if TYPE_CHECKING:
    from torch import nn

    from ..trainer.trainer import Trainer

__all__ = ["OnExceptionCheckpoint"]

_log = logging.getLogger(__name__)


class OnExceptionCheckpoint(Checkpoint):
    """Save `dirpath/filename.ckpt` when fit fails or is interrupted; remove it when a fit succeeds.

    Resuming from it goes on in the middle of the epoch and repeats the step that failed, with the same samples; random
    numbers which that step has drawn already are drawn anew. With several ranks, rank 0 writes; after an error of one
    rank alone, it writes what it has by itself, and nothing where the model is spread over the ranks.

    Args:
        dirpath: The folder; it is made when it is needed.
        filename: Name of the file, without its extension.

    Raises:
        ConfigError: The name is empty.
    """

    FILE_EXTENSION = ".ckpt"

    def __init__(self, dirpath: str | os.PathLike[str], filename: str = "on_exception") -> None:
        if not filename:
            raise ConfigError("OnExceptionCheckpoint: filename is empty.", fix="pass a name, or leave it out.")
        self.dirpath = os.path.expanduser(os.fspath(dirpath))
        self.filename = filename

    @property
    def ckpt_path(self) -> str:
        """Path of the checkpoint, whether it exists or not."""
        return os.path.join(self.dirpath, self.filename + self.FILE_EXTENSION)

    def on_exception(self, trainer: Trainer, pl_module: nn.Module, exception: BaseException) -> None:
        """Save what there is. A failure to save is logged: the first error is the one to see."""
        if trainer.state.fn != "fit" or trainer.fast_dev_run or isinstance(exception, CheckpointError):
            return
        if not (trainer.ranks_answer or trainer.is_global_zero):
            return  # after an error the ranks cannot agree on anything: rank 0 saves what it has
        try:
            trainer.save_checkpoint(self.ckpt_path)
            trainer.wait_for_save()
        except (CheckpointError, OSError, RuntimeError) as error:
            _log.exception("OnExceptionCheckpoint: nothing could be saved on %s: %s", type(exception).__name__, error)
            return
        _log.warning("OnExceptionCheckpoint: saved %s on %s.", self.ckpt_path, type(exception).__name__)

    def teardown(self, trainer: Trainer, pl_module: nn.Module, stage: str) -> None:
        """Remove the checkpoint of an earlier failure: the training has succeeded."""
        if stage == "fit" and trainer.is_global_zero and not trainer.fast_dev_run:
            trainer.strategy.checkpoint_io.remove_checkpoint(self.ckpt_path)
