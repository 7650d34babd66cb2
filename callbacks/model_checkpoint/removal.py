"""Removal of replaced checkpoints, and of leftovers of a killed run."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass

from ...errors import CheckpointError
from ...lazy import is_core
from ...protocols import CheckpointPlugin
from . import files as files
from .state import CheckpointState

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CheckpointRemoval:
    """Removal of the files that the checkpoint state no longer keeps.

    Attributes:
        state: Files that are kept and files to remove.
        dirpath: The callback's folder; files elsewhere are not removed.
        resumed_path: Checkpoint that this run resumed from; empty if it started from scratch.
        may_remove_resumed: Whether that checkpoint may be removed, too.
    """

    state: CheckpointState
    dirpath: str
    resumed_path: str
    may_remove_resumed: bool

    def remove_pending(self, remove: Callable[[str], None]) -> None:
        """Remove the files that were replaced, with a function that removes one."""
        for path in self.state.pending_removals:
            if self._may_remove(path):
                remove(path)

    def remove_leftovers(self) -> None:
        """Remove the files that the resumed run was about to remove, unless they were written again since."""
        if not self.state.pending_removals or not self.resumed_path:
            return
        resumed_ns = files.modified_ns(self.resumed_path)
        for path in self.state.pending_removals:
            if files.exists(path) and self._may_remove(path) and files.modified_ns(path) <= resumed_ns:
                remove_or_warn(path)

    def complete_last(self, step: int, *, is_link: bool) -> None:
        """Write `last` if the run was killed between it and the resumed file: they have the same content.

        Args:
            step: `global_step` of the resumed checkpoint.
            is_link: Whether `last` is a link.
        """
        path, resumed = self.state.last_path, self.resumed_path
        if not files.is_local(path) or not files.is_inside(path, self.dirpath):
            return
        if self.state.last_step != step or not self.state.holds(resumed) or resumed == path:
            return
        if files.exists(path) and files.modified_ns(path) >= files.modified_ns(resumed):
            return
        old = files.make_way(path, for_folder=not is_link and os.path.isdir(resumed))
        if is_link:
            files.link(resumed, path)
        else:
            files.copy(resumed, path)
        if old is not None:
            remove_or_warn(old)

    def find_passed_over(self, extension: str) -> set[str]:
        """Return files that `ckpt_path="last"` passed over as damaged: this run writes the same steps again."""
        resumed_ns = files.modified_ns(self.resumed_path)
        found = files.find_checkpoints([self.dirpath], extension)
        return {path for path in found if not self.state.holds(path) and files.modified_ns(path) > resumed_ns}

    def _may_remove(self, path: str) -> bool:
        if self.state.holds(path):
            return False
        if self.resumed_path and not self.may_remove_resumed and files.same_file(self.resumed_path, path):
            return False  # a run that dies now resumes from it again
        if self.state.last_path and not os.path.islink(path) and files.same_file(self.state.last_path, path):
            return False  # `last` is a link to it
        return files.is_inside(path, self.dirpath)  # a checkpoint may come from others, and name anything


def remove_or_warn(path: str, plugin: CheckpointPlugin | None = None) -> None:
    """Remove a checkpoint, through a plugin of the user's; a failure is logged, and training continues."""
    remove = files.remove if plugin is None or _is_built_in(plugin) else plugin.remove_checkpoint
    try:
        remove(path)
    except (OSError, CheckpointError) as error:
        _log.warning("ModelCheckpoint: %s could not be removed: %s", path, error)


def _is_built_in(plugin: CheckpointPlugin) -> bool:
    """Return whether neither the plugin nor one that it wraps is of a class of the user's."""
    wrapped = getattr(plugin, "checkpoint_io", None)
    return is_core(type(plugin)) and (wrapped is None or _is_built_in(wrapped))
