"""Steps around the writing of a checkpoint: freeing its path, links, notification of loggers."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from ...checkpoint.checkpoint_io import TorchCheckpointIO
from ...strategies.optional import saves_shards
from ..base import from_rank_zero
from . import files as files
from .removal import remove_or_warn

if TYPE_CHECKING:
    from ...trainer import Trainer
    from .callback import ModelCheckpoint

_log = logging.getLogger(__name__)


def make_way(trainer: Trainer, paths: list[str], *, has_own_format: bool = False) -> dict[str, str]:
    """Rename existing checkpoints of another form (file or folder) than the ones that replace them.

    Called on every rank.

    Args:
        trainer: The trainer.
        paths: Where checkpoints will be written.
        has_own_format: Whether a subclass makes folders of them, which are in the way too.

    Returns:
        Their new names by path, which they keep until the new checkpoint is complete.
    """
    checkpoint_io = trainer.strategy.checkpoint_io
    if type(getattr(checkpoint_io, "checkpoint_io", checkpoint_io)) is not TorchCheckpointIO:
        return {}  # a user's own format

    def rename() -> dict[str, str]:
        is_folder = saves_shards(trainer.strategy, "full")
        moved = {path: files.make_way(path, for_folder=is_folder, any_folder=has_own_format) for path in paths}
        return {path: name for path, name in moved.items() if name is not None}

    return from_rank_zero(trainer, rename)


def link_or_copy(target: str, path: str) -> None:
    """Make `path` a link to a checkpoint, or a copy of it where links cannot be made."""
    if not link_or_warn(target, path):
        files.copy(target, path)


def link_or_warn(target: str, path: str) -> bool:
    """Make `path` a link to a checkpoint; return whether that succeeded, and log the reason if not."""
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


def notify_loggers(trainer: Trainer, callback: ModelCheckpoint, *, num_files: int) -> None:
    """Notify each logger once per file; on rank 0 only."""
    if not trainer.is_global_zero:
        return
    for _ in range(num_files):
        for logger in trainer.loggers:
            try:
                logger.after_save_checkpoint(callback)
            except Exception:  # a failing logger is reported and does not end training
                _log.exception("%s.after_save_checkpoint failed; training continues.", type(logger).__name__)
