"""Which checkpoints go, and what a kill left over."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass

from ...errors import CheckpointError
from . import files as files
from .state import CheckpointState

__all__ = ["CheckpointRemoval", "remove_or_warn"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CheckpointRemoval:
    """What may be removed, by the books.

    Attributes:
        state: Which files are kept, and which are to go.
        dirpath: The callback's folder; files elsewhere are not removed.
        resumed_path: What this run went on from; empty if it began anew.
        may_remove_resumed: Whether that may go, too.
    """

    state: CheckpointState
    dirpath: str
    resumed_path: str
    may_remove_resumed: bool

    def remove_pending(self) -> None:
        """Remove the files that have lost their place."""
        for path in self.state.pending_removals:
            if self._may_remove(path):
                remove_or_warn(path)

    def remove_leftovers(self) -> None:
        """Remove what the checkpoint that is resumed had meant to remove, unless it was written again since."""
        if not self.state.pending_removals or not self.resumed_path:
            return
        resumed_ns = files.modified_ns(self.resumed_path)
        for path in self.state.pending_removals:
            if files.exists(path) and self._may_remove(path) and files.modified_ns(path) <= resumed_ns:
                remove_or_warn(path)

    def complete_last(self, step: int, *, is_link: bool) -> None:
        """Write `last` if a kill came between it and the file that is resumed: they have the same content.

        Args:
            step: `global_step` of what is resumed.
            is_link: Whether `last` is a link.
        """
        path, resumed = self.state.last_path, self.resumed_path
        if not files.is_local(path):
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
        return not files.is_local(path) or files.is_inside(path, self.dirpath)


def remove_or_warn(path: str) -> None:
    """Remove a checkpoint; a failure is said, and training goes on."""
    try:
        files.remove(path)
    except (OSError, CheckpointError) as error:
        _log.warning("ModelCheckpoint: %s could not be removed: %s", path, error)
