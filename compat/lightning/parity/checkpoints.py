"""Checkpoints as in Lightning: where they are, when `last.ckpt` is written, and which of equal scores is replaced."""

from __future__ import annotations

from dataclasses import replace

from ....callbacks import ModelCheckpoint
from ....callbacks.model_checkpoint.files import default_dirpath
from ....callbacks.model_checkpoint.top_k import TopK
from ....trainer.hooks import Hook
from ....trainer.run import Run
from ....trainer.trainer import Trainer
from ..loops import trainer_of

__all__ = [
    "keep_first_folder",
    "keep_written_steps",
    "replace_earliest",
    "save_last_with_best",
    "save_with_latest_values",
    "write_all_digits",
]


def save_last_with_best(run: Run) -> None:
    """Let a ModelCheckpoint that counts epochs write `last` only with another file, or the first time."""
    for callback in run.callbacks:
        if isinstance(callback, ModelCheckpoint):
            callback.rules = replace(callback.rules, updates_last_alone=False)


def write_all_digits(run: Run) -> None:
    """Let a metric without a format have all its digits in the name of a checkpoint."""
    for callback in run.callbacks:
        if isinstance(callback, ModelCheckpoint):
            callback.rules = replace(callback.rules, number_format="")


def keep_first_folder(run: Run) -> None:
    """Let a ModelCheckpoint without `dirpath` keep the folder of its first fit, as the logger names it."""

    def around(fire: Hook) -> Hook:
        def on_fit_start() -> None:
            for callback in run.callbacks:
                if isinstance(callback, ModelCheckpoint) and callback.given_dirpath is None:
                    callback.given_dirpath = callback.dirpath or default_dirpath(trainer_of(run))
            fire()

        return on_fit_start

    run.lifecycle.wrap("on_fit_start", around)


def keep_written_steps(run: Run) -> None:
    """Let a ModelCheckpoint remember the step of its last file, also where an earlier fit has written that."""
    callbacks = [one for one in run.callbacks if isinstance(one, ModelCheckpoint)]

    def around(fire: Hook) -> Hook:
        def on_train_start() -> None:
            written = [callback.written_step for callback in callbacks]
            fire()
            for callback, step in zip(callbacks, written, strict=True):
                callback.written_step = step

        return on_train_start

    run.lifecycle.wrap("on_train_start", around)


def save_with_latest_values(run: Run) -> None:
    """Let a ModelCheckpoint save when it is due, once per step, with the available values."""
    callbacks = [one for one in run.callbacks if isinstance(one, ModelCheckpoint)]
    for callback in callbacks:
        callback.rules = replace(callback.rules, trigger=_trigger, is_fresh=_is_fresh)

    def around(fire: Hook) -> Hook:
        def on_train_epoch_end() -> None:
            waiting = [one for one in callbacks if one.checkpoint_state.is_waiting and not one.saves_at_epoch_end]
            for callback in waiting:
                callback.checkpoint_state.is_waiting = False
            fire()
            for callback in waiting:
                callback.checkpoint_state.is_waiting = True

        return on_train_epoch_end

    run.lifecycle.wrap("on_train_epoch_end", around)


def _trigger(callback: ModelCheckpoint, trainer: Trainer, *, strict: bool) -> None:
    if max(callback.written_step, 0) == trainer.global_step:
        return
    state = callback.checkpoint_state
    was_waiting = state.is_waiting and trainer.state.stage == "train"
    state.triggered_step = -1  # a score that was not kept is compared again
    callback.trigger_save(trainer, strict=strict)
    # Only a validation performs a save that was postponed, and only if saves follow validations.
    callback.checkpoint_state.is_waiting = (
        callback.checkpoint_state.is_waiting or was_waiting
    ) and not callback.saves_at_epoch_end


def _is_fresh(callback: ModelCheckpoint, trainer: Trainer, *, strict: bool) -> bool:
    if callback.written_step == trainer.global_step:
        return False
    is_missing = any(name not in trainer.callback_metrics for name in callback.score_metrics())
    if is_missing and strict:
        return callback.has_fresh_score(trainer, strict=True)  # raises
    validates = trainer.fit_loop.validates_in_this_epoch and trainer.enable_validation
    is_step_due = not strict and not callback.saves_at_epoch_end and callback.checkpoint_state.is_waiting
    will_come = is_step_due and bool(callback.score_metrics()) and trainer.is_last_batch and validates
    return not is_missing and not (will_come and trainer.state.stage == "train")


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
            callback.rules = replace(callback.rules, top_k_type=_EarliestFirst)
            known = callback.checkpoint_state.top_k
            top_k = _EarliestFirst(known.k, known.mode, known.scores)
            callback.checkpoint_state = replace(callback.checkpoint_state, top_k=top_k)
