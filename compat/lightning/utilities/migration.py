"""`migrate_checkpoint`: checkpoints of former versions of Lightning in the form of its present one.

Reading does not need it, because it supports the files of every version. Programs call it before they change a file, or
to convert an archive.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from ....callbacks import EarlyStopping
from ....checkpoint.content import LIGHTNING_VERSION_KEY
from ....checkpoint.tools.convert import lightning_loop
from ....messages import warn
from ..callbacks.classes import ModelCheckpoint
from ..imports.finder import VERSION

__all__ = ["migrate_checkpoint", "pl_legacy_patch"]

# Any in this file: entries of checkpoints.
_Checkpoint = dict[str, Any]

# Former name of an entry -> its callback, and the entry of that callback's state.
_CALLBACK_ENTRIES = {
    "checkpoint_callback_best_model_score": (ModelCheckpoint, "best_model_score"),
    "checkpoint_callback_best_model_path": (ModelCheckpoint, "best_model_path"),
    "checkpoint_callback_best": (ModelCheckpoint, "best_model_score"),
    "early_stop_callback_wait": (EarlyStopping, "wait_count"),
    "early_stop_callback_patience": (EarlyStopping, "patience"),
}
# Former place of a state within the fit loop -> the present one.
_LOOP_ENTRIES = {
    "epoch_loop.batch_loop.manual_loop.": "epoch_loop.manual_optimization.",
    "epoch_loop.batch_loop.optimizer_loop.": "epoch_loop.automatic_optimization.",
    "epoch_loop.manual_loop.": "epoch_loop.manual_optimization.",
    "epoch_loop.optimizer_loop.": "epoch_loop.automatic_optimization.",
}


def migrate_checkpoint(
    checkpoint: dict[str, Any], target_version: str | None = None
) -> tuple[dict[str, Any], dict[str, list[str]]]:
    """Bring a checkpoint to the form of Lightning's present version, in place.

    Args:
        checkpoint: It says by which version it was written.
        target_version: The last version whose changes are made; None makes all.

    Returns:
        The checkpoint, and the changes that were made: version to their names.
    """
    written_by = str(checkpoint[LIGHTNING_VERSION_KEY])
    if _order(written_by) > _order(VERSION):
        warn(f"the checkpoint was written by Lightning {written_by}, which is newer than {VERSION}")
        return checkpoint, {}
    last = VERSION if target_version is None else target_version
    made = {}
    for version, changes in _CHANGES.items():
        if _order(written_by) < _order(version) <= _order(last):
            for change in changes:
                change(checkpoint)
            made[version] = [change.__name__ for change in changes]
    if written_by != VERSION:
        checkpoint.setdefault(f"legacy_{LIGHTNING_VERSION_KEY}", written_by)
    checkpoint[LIGHTNING_VERSION_KEY] = VERSION
    return checkpoint, made


class pl_legacy_patch:  # Lightning's name
    """A context in which nothing is changed: objects of old modules are not unpickled."""

    def __enter__(self) -> None:
        """Begin."""

    def __exit__(self, *error: object) -> None:
        """End."""


def _order(version: str) -> tuple[int, ...]:
    numbers = [int(part) for part in re.findall(r"\d+", version)[:3]]
    is_final = re.search(r"(dev|rc|a|b)\d*", version) is None
    return (*numbers, *[0] * (3 - len(numbers)), int(is_final))


def _move_states_of_callbacks(checkpoint: _Checkpoint) -> None:
    """Put scores and counters into the states of their callbacks, whose keys were classes then."""
    states = checkpoint["callbacks"] = checkpoint.get("callbacks") or {}
    for key, (callback, name) in _CALLBACK_ENTRIES.items():
        if key in checkpoint:
            states.setdefault(callback, {})[name] = checkpoint.pop(key)


def _add_loops(checkpoint: _Checkpoint) -> None:
    """Put the counts of epochs and steps where the loops look for them."""
    steps, epochs = int(checkpoint["global_step"]), int(checkpoint["epoch"])
    loop = checkpoint.setdefault("loops", {}).setdefault("fit_loop", {})
    present = {_renamed(key) for key in loop}
    loop.update({key: state for key, state in lightning_loop({}).items() if key not in present})
    for key, state in loop.items():
        if key.endswith(".optim_progress"):
            state["optimizer"]["step"]["total"]["completed"] = steps
        elif key.endswith(".optim_step_progress"):
            state["total"]["completed"] = steps
    loop["epoch_progress"]["current"]["completed"] = epochs


def _add_batches_that_stepped(checkpoint: _Checkpoint) -> None:
    """Count each step as a batch."""
    state = checkpoint["loops"]["fit_loop"].setdefault("epoch_loop.state_dict", {})
    state.setdefault("_batches_that_stepped", int(checkpoint["global_step"]))


def _shorten_keys_of_checkpoint_callbacks(checkpoint: _Checkpoint) -> None:
    """Take `save_on_train_epoch_end` out of the keys of ModelCheckpoint, unless two would be equal then."""
    states = checkpoint.get("callbacks")
    if states is None:
        return
    part = re.compile(r", 'save_on_train_epoch_end': (None|True|False)")
    short = {
        part.sub("", key) if isinstance(key, str) and key.startswith("ModelCheckpoint") else key: state
        for key, state in states.items()
    }
    if len(short) < len(states):
        warn("states of several ModelCheckpoint callbacks have the same key now: they keep their former keys")
        return
    checkpoint["callbacks"] = short


def _drop_apex(checkpoint: _Checkpoint) -> None:
    """Remove the loss scale of apex."""
    if checkpoint.pop("amp_scaling_state", None) is not None:
        warn("the checkpoint has a loss scale of apex, which is not supported any more: it was removed")


def _rename_loops(checkpoint: _Checkpoint) -> None:
    """Put the states of optimizers and of evaluations where the loops look for them."""
    loops = checkpoint.get("loops", {})
    loop = loops.get("fit_loop", {})
    for key in [key for key in loop if _renamed(key) != key]:
        loop[_renamed(key)] = loop.pop(key)
    loop.get("epoch_loop.automatic_optimization.optim_progress", {}).pop("optimizer_position", None)
    rest = loop.pop("epoch_loop.batch_loop.state_dict", None)
    if rest:
        loop["epoch_loop.state_dict"]["old_batch_loop_state_dict"] = rest
    for name in ("predict_loop", "validate_loop", "test_loop"):
        evaluation = loops.get(name, {})
        evaluation.pop("dataloader_progress", None)
        for key in [key for key in evaluation if key.startswith("epoch_loop.")]:
            evaluation[key.removeprefix("epoch_loop.")] = evaluation.pop(key)


def _renamed(key: str) -> str:
    former = next((one for one in _LOOP_ENTRIES if key.startswith(one)), None)
    return key if former is None else _LOOP_ENTRIES[former] + key.removeprefix(former)


_CHANGES: dict[str, list[Callable[[_Checkpoint], None]]] = {
    "0.10.0": [_move_states_of_callbacks],
    "1.6.0": [_add_loops],
    "1.6.5": [_add_batches_that_stepped],
    "1.9.0": [_shorten_keys_of_checkpoint_callbacks],
    "2.0.0": [_drop_apex, _rename_loops],
}
