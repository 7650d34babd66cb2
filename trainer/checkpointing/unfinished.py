"""Events that a checkpoint was taken in, and that a resumed run finishes before it trains on.

A save lets everybody else hear of the running event first (`Lifecycle.finish_event`), so that little can be due:

- `validation_end`: on_validation_epoch_end is done, and on_validation_end is not;
- `told_later`: checkpoint callbacks that come after the one that saved.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ...callbacks import Callback, Checkpoint
from ...data.rng import capture_rng, restore_rng
from ...protocols import StateDict
from ..loop import rank_rng
from . import snapshot

if TYPE_CHECKING:
    from ..run import Run
    from ..trainer import Trainer

__all__ = ["finish"]


def finish(trainer: Trainer, run: Run) -> None:
    """Bring what was due when the resumed checkpoint was taken. On every rank, after everything is put back."""
    due, run.unfinished = run.unfinished, {}
    if "validation_end" in due:
        _end_validation(trainer, run, due["validation_end"])
    if "told_later" in due:
        _tell(trainer, run, due["told_later"]["event"], set(due["told_later"]["callbacks"]))


def _end_validation(trainer: Trainer, run: Run, due: StateDict) -> None:
    """Bring on_validation_end, with the module and the random number generators as they are at a validation's end."""
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


def _tell(trainer: Trainer, run: Run, event: str, keys: set[str]) -> None:
    """Tell an event to the checkpoint callbacks with these state keys."""

    def chosen(callback: Callback) -> bool:
        return isinstance(callback, Checkpoint) and callback.state_key in keys

    progress, rng = trainer.progress, capture_rng()
    tell = run.lifecycle.of_callbacks(event, chosen=chosen)
    ends_epoch = event == "on_train_epoch_end" and not progress.epoch_open
    if ends_epoch:  # the checkpoint counts the epoch as done; its end is told while it is the present one
        progress.epochs -= 1
        progress.epoch_open = progress.is_closing_epoch = run.is_epoch_over = True
    if event == "on_train_batch_end":
        tell(None, None, progress.batches_in_epoch - 1)
    else:
        tell()
    if ends_epoch:
        progress.end_epoch()
    restore_rng(rng)
