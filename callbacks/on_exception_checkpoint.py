"""`OnExceptionCheckpoint`: a checkpoint of the state at which training failed."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from ..errors import CheckpointError, ConfigError
from .base import AnyModule, Checkpoint

if TYPE_CHECKING:
    from ..trainer import Trainer

_log = logging.getLogger(__name__)


class OnExceptionCheckpoint(Checkpoint):
    """Save `dirpath/filename.ckpt` when fit fails or is interrupted; remove it when a fit succeeds.

    A resumed run continues in the middle of the epoch and repeats the failed step with the same samples, but draws
    new random numbers for it. Rank 0 writes; after an error of one rank, it saves its own state, or nothing if the
    model is sharded.

    Args:
        dirpath: Directory of the checkpoint; created if necessary.
        filename: Name of the file, without its extension.

    Raises:
        ConfigError: `filename` is empty.
    """

    FILE_EXTENSION = ".ckpt"

    def __init__(self, dirpath: str | os.PathLike[str], filename: str = "on_exception") -> None:
        super().__init__()
        if not filename:
            raise ConfigError("OnExceptionCheckpoint: filename is empty.", fix="pass a name, or leave it out.")
        self.dirpath = os.path.expanduser(os.fspath(dirpath))
        self.filename = filename

    @property
    def ckpt_path(self) -> str:
        """Path of the checkpoint, whether it exists or not."""
        return os.path.join(self.dirpath, self.filename + self.FILE_EXTENSION)

    def on_exception(self, trainer: Trainer, pl_module: AnyModule, exception: BaseException) -> None:
        """Save the current state. A failure to save is logged, so that the first error is raised."""
        if trainer.state.fn != "fit" or trainer.fast_dev_run or isinstance(exception, CheckpointError):
            return
        if not (trainer.ranks_answer or trainer.is_global_zero):
            return  # after an error the ranks cannot synchronize: rank 0 saves its own state
        try:
            trainer.save_checkpoint(self.ckpt_path)
            trainer.wait_for_save()
        except (CheckpointError, OSError, RuntimeError) as error:
            _log.exception("OnExceptionCheckpoint: nothing could be saved on %s: %s", type(exception).__name__, error)
            return
        _log.warning("OnExceptionCheckpoint: saved %s on %s.", self.ckpt_path, type(exception).__name__)

    def teardown(self, trainer: Trainer, pl_module: AnyModule, stage: str) -> None:
        """Remove the checkpoint of an earlier failure: the training has succeeded."""
        if stage == "fit" and trainer.is_global_zero and not trainer.fast_dev_run:
            trainer.fabric.checkpoint_io.remove_checkpoint(self.ckpt_path)
