"""A checkpoint that is being written in the background.

Actions that need a complete file (removing older ones, moving links, notifying loggers) wait here, too. It
communicates, so it is done in the main thread, at the same place of the program on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ...errors import CheckpointError

if TYPE_CHECKING:
    from ...protocols import BackgroundPlugin
    from ..view import TrainerView


class PendingSave:
    """One save in progress.

    Args:
        checkpoint_io: Writes it on this rank, or on another only.
        path: Its path, for messages.
    """

    def __init__(self, checkpoint_io: BackgroundPlugin, path: str) -> None:
        self._checkpoint_io = checkpoint_io
        self._path = path
        self._error: Exception | None = None
        self._follow_ups: list[tuple[Callable[[], None], Callable[[], None] | None]] = []

    @property
    def is_writing(self) -> bool:
        """Whether this rank is still writing."""
        return self._checkpoint_io.is_writing

    def then(self, done: Callable[[], None], failed: Callable[[], None] | None) -> None:
        """Call one of these once the outcome of the save is known; after a failure, in reverse order."""
        self._follow_ups.append((done, failed))

    def wait(self, *, before_save: bool) -> None:
        """Wait until this rank has written its part. Ctrl-C may interrupt it; then it can be called again."""
        try:
            self._checkpoint_io.wait(before_save=before_save)
        except Exception as error:  # raised by `finish`, when all ranks know
            self._error = error

    def finish(self, trainer: TrainerView) -> None:
        """Run the actions, after `wait`; on every rank.

        Raises:
            CheckpointError: The save failed, on this rank or on another.
        """
        error = self._error
        if trainer.ranks_answer:
            error = self._error_of_all(trainer, error)
        elif not trainer.is_global_zero and error is None:
            return  # it wrote a part at most, and the other ranks cannot be asked about the rest
        if error is None:
            for done, _ in self._follow_ups:
                done()
            return
        for _, failed in reversed(self._follow_ups):
            if failed is not None:
                failed()
        raise error

    def _error_of_all(self, trainer: TrainerView, own: Exception | None) -> Exception | None:
        told = trainer.strategy.gather_objects(None if own is None else f"{type(own).__name__}: {own}")
        failures = {rank: text for rank, text in enumerate(told) if text is not None}
        if own is not None or not failures:
            return own
        rank, text = next(iter(failures.items()))
        return CheckpointError(
            f"rank {rank} could not write {self._path!r}, which was saved in the background: {text}",
            fix=f"look at rank {rank}'s message; an earlier checkpoint at that path is intact.",
        )
