"""Checkpoints as in Lightning: where they are, when `last.ckpt` is written, and which of equal scores is replaced."""

from __future__ import annotations

from dataclasses import replace

from ....callbacks import ModelCheckpoint
from ....callbacks.model_checkpoint.files import default_dirpath
from ....callbacks.model_checkpoint.top_k import TopK
from ....trainer.hooks import Hook
from ....trainer.run import Run

__all__ = ["keep_first_folder", "replace_earliest", "save_last_with_best", "write_all_digits"]


def save_last_with_best(run: Run) -> None:
    """Let a ModelCheckpoint that counts epochs write `last` only where it writes another file, or never has."""
    for callback in run.callbacks:
        if isinstance(callback, ModelCheckpoint):
            callback._updates_last_alone = False


def write_all_digits(run: Run) -> None:
    """Let a metric without a format have all its digits in the name of a checkpoint."""
    for callback in run.callbacks:
        if isinstance(callback, ModelCheckpoint):
            callback._number_format = ""


def keep_first_folder(run: Run) -> None:
    """Let a ModelCheckpoint without `dirpath` keep the folder of its first fit, as the logger names it."""

    def around(fire: Hook) -> Hook:
        def on_fit_start() -> None:
            for callback in run.callbacks:
                if isinstance(callback, ModelCheckpoint) and callback._given_dirpath is None:
                    callback._given_dirpath = callback.dirpath or default_dirpath(run.trainer)
            fire()

        return on_fit_start

    run.lifecycle.wrap("on_fit_start", around)


class _EarliestFirst(TopK):
    """Replaces the earliest of equal scores."""

    __slots__ = ()

    @property
    def kth_path(self) -> str:
        """Path that the next better one would replace, the earliest of equals; empty unless k are kept."""
        if self.k < 1 or len(self.scores) < self.k:
            return ""
        return max(self.scores, key=self._cost)


def replace_earliest(run: Run) -> None:
    """Let a ModelCheckpoint replace the earliest of several files with the same score."""
    for callback in run.callbacks:
        if isinstance(callback, ModelCheckpoint):
            callback._top_k_type = _EarliestFirst
            known = callback._state.top_k
            top_k = _EarliestFirst(known.k, known.mode, known.scores)
            callback._state = replace(callback._state, top_k=top_k)
