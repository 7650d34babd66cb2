"""Events that were unfinished when a checkpoint was saved; a resumed run finishes them before it continues training.

A save first calls all other listeners of the current event (`Lifecycle.finish_event`), so that only these can remain:

- `validation_end`: on_validation_epoch_end is done, but on_validation_end is not;
- `told_later`: checkpoint callbacks after the one that saved.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ...callbacks import Callback, Checkpoint
from ...callbacks.base import find_state
from ...data.rng import capture_rng, restore_rng
from ...protocols import StateDict
from ..loop import rank_rng
from . import snapshot

if TYPE_CHECKING:
    from ..run import FitRun
    from ..view import TrainerView


def finish(trainer: TrainerView, run: FitRun) -> None:
    """Finish the events that were unfinished in the resumed checkpoint. On every rank, after all state is loaded."""
    due, run.unfinished = run.unfinished, {}
    if "validation_end" in due:
        _end_validation(trainer, run, due["validation_end"])
    if "told_later" in due:
        _call_checkpoints(trainer, run, due["told_later"]["event"], set(due["told_later"]["callbacks"]))


def _end_validation(trainer: TrainerView, run: FitRun, due: StateDict) -> None:
    """Call on_validation_end, with the module and the random number generators as at the end of a validation."""
    before = run.before_validation = snapshot.before_validation(run)
    before.is_over = True
    drawn = rank_rng.own_state(trainer.strategy, due["rng_of_ranks"], due.get("rng_places"))
    if drawn is not None:
        restore_rng(drawn)
    trainer.state.stage = "validate"
    modes = [(child, child.training) for child in run.module.modules()]
    (run.lifecycle.own("on_validation_model_eval") or run.module.eval)()
    with torch.no_grad():
        run.lifecycle.on_validation_end()
    own = run.lifecycle.own("on_validation_model_train")
    if own is not None:
        own()
    else:
        for child, was_training in modes:
            child.training = was_training
    trainer.state.stage = "train"
    run.before_validation = None
    restore_rng(before.rng)


def _call_checkpoints(trainer: TrainerView, run: FitRun, event: str, keys: set[str]) -> None:
    """Call the hook of an event on the checkpoint callbacks with these state keys."""

    def chosen(callback: Callback) -> bool:
        return isinstance(callback, Checkpoint) and find_state(keys, callback.state_key) is not None

    progress, rng = trainer.progress, capture_rng()
    fire = run.lifecycle.of_callbacks(event, chosen=chosen)
    ends_epoch = event == "on_train_epoch_end" and not progress.epoch_open
    if ends_epoch:  # the checkpoint counts the epoch as ended; its hooks are called while it is the current one
        progress.epochs -= 1
        progress.epoch_open = progress.is_closing_epoch = run.is_epoch_over = True
    if event == "on_train_batch_end":
        fire(None, None, progress.batches_in_epoch - 1)
    else:
        fire()
    if ends_epoch:
        progress.end_epoch()
    restore_rng(rng)
