"""What stands beside the writing of a checkpoint: room at its path, links, loggers."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from ...checkpoint.checkpoint_io import TorchCheckpointIO
from ..base import from_rank_zero
from . import files as files
from .removal import remove_or_warn

if TYPE_CHECKING:
    from ...trainer.trainer import Trainer
    from .callback import ModelCheckpoint

__all__ = ["link_or_copy", "link_or_warn", "make_way", "tell_loggers"]

_log = logging.getLogger(__name__)


def make_way(trainer: Trainer, paths: list[str]) -> dict[str, str]:
    """Rename checkpoints that are overwritten and of another form than before: with `state_dict_type`, say.

    Called on every rank.

    Returns:
        For their paths the new names, under which they stay until the new checkpoint is whole.
    """
    checkpoint_io = trainer.strategy.checkpoint_io
    if type(getattr(checkpoint_io, "checkpoint_io", checkpoint_io)) is not TorchCheckpointIO:
        return {}  # a user's own form

    def rename() -> dict[str, str]:
        is_folder = trainer.strategy.saves_shards("full")
        moved = {path: files.make_way(path, for_folder=is_folder) for path in paths}
        return {path: name for path, name in moved.items() if name is not None}

    return from_rank_zero(trainer, rename)


def link_or_copy(target: str, path: str) -> None:
    """Make `path` a link to a checkpoint, or a copy of it where links cannot be made."""
    if not link_or_warn(target, path):
        files.copy(target, path)


def link_or_warn(target: str, path: str) -> bool:
    """Make `path` a link to a checkpoint; return whether it is one, and say why not."""
    old = files.make_way(path, for_folder=False)
    try:
        files.link(target, path)
    except OSError as error:
        if old is not None:
            files.move(old, path)
        _log.warning("ModelCheckpoint: %s cannot be a link (%s); a file is written.", path, error)
        return False
    if old is not None:
        remove_or_warn(old)
    return True


def tell_loggers(trainer: Trainer, callback: ModelCheckpoint, *, num_files: int) -> None:
    """Tell each logger once for each file that it is there; only rank 0 does."""
    if not trainer.is_global_zero:
        return
    for _ in range(num_files):
        for logger in trainer.loggers:
            try:
                logger.after_save_checkpoint(callback)
            except Exception:  # a logger that fails is said and does not end training
                _log.exception("%s.after_save_checkpoint failed; training goes on.", type(logger).__name__)
