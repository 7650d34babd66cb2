"""Content of a checkpoint: named states, and the keys of the file that store them.

trainer/trainer.py collects the states and puts them back. The field's keys (`state_dict`, `optimizer_states`,
`lr_schedulers`, `callbacks`, `epoch`, `global_step`, hyperparameters) stand at the top, so that any script can use
them; what only Loopwright knows stands under one key, `loopwright`.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..errors import CheckpointError
from ..protocols import StateDict

__all__ = ["OWN_KEY", "PARAM_NAMES", "SCHEMA_VERSION", "Content", "fit_by_name", "read", "write"]

OWN_KEY = "loopwright"
SCHEMA_VERSION = 1
PARAM_NAMES = "param_names"
LIGHTNING_VERSION_KEY = "pytorch-lightning_version"

# Name of a state -> key of the file.
_FIELD_KEYS = {
    "module": "state_dict",
    "callbacks": "callbacks",
    "optimizers": "optimizer_states",
    "schedulers": "lr_schedulers",
}
_OWN_STATES = (
    "progress",
    "data",
    "rng",
    "rng_of_ranks",
    "rng_places",
    "strategy",
    "metrics",
    "metric_objects",
    "precision",
    "loggers",
    "schedule_progress",
    "optimizer_record",
    "gradients",
    "window",
    "validation_generators",
    "frozen",
    "excluded",
    "unfinished",
    "after_validation",
)


@dataclass(slots=True)
class Content:
    """The states of a checkpoint by name.

    Attributes:
        states: progress, module, callbacks, optimizers, schedulers, precision, data, rng, metrics, loggers, ...
        extra: Whatever else stands at the top of the file: hyperparameters, the data module's state, entries of hooks.
        is_foreign: Whether another library wrote the file, so that only the field's keys are there.
    """

    states: StateDict
    extra: StateDict = field(default_factory=dict)
    is_foreign: bool = False


def write(content: Content, *, epoch: int, global_step: int, world_size: int, version: str) -> StateDict:
    """Return the dict that is saved."""
    unknown = set(content.states) - set(_FIELD_KEYS) - set(_OWN_STATES)
    assert not unknown, f"states without a place in the file: {unknown}"
    checkpoint: StateDict = {"epoch": epoch, "global_step": global_step, "loopwright_version": version}
    for name, key in _FIELD_KEYS.items():
        if name in content.states:
            checkpoint[key] = content.states[name]
    checkpoint.update(content.extra)
    checkpoint[OWN_KEY] = {
        "schema": SCHEMA_VERSION,
        "versions": {"loopwright": version, "torch": str(torch.__version__), "python": platform.python_version()},
        "world_size": world_size,
        **{name: content.states[name] for name in _OWN_STATES if name in content.states},
    }
    return checkpoint


def read(checkpoint: Mapping[str, Any], *, source: str) -> Content:
    """Return the states of a checkpoint of Loopwright, or of one with the field's keys.

    Raises:
        CheckpointError: There is no `state_dict`, or a newer Loopwright wrote the file.
    """
    if not isinstance(checkpoint, Mapping) or "state_dict" not in checkpoint:
        keys = sorted(map(str, checkpoint))[:10] if isinstance(checkpoint, Mapping) else type(checkpoint).__name__
        raise CheckpointError(
            f"{source} has no entry 'state_dict'; it has {keys}.",
            fix="give a checkpoint of trainer.save_checkpoint, ModelCheckpoint or Lightning; for a bare state dict use "
            "module.load_state_dict(torch.load(path, weights_only=True)).",
        )
    states = {name: checkpoint[key] for name, key in _FIELD_KEYS.items() if key in checkpoint}
    known = {*_FIELD_KEYS.values(), "epoch", "global_step", "loopwright_version", OWN_KEY}
    extra = {key: value for key, value in checkpoint.items() if key not in known}
    own = checkpoint.get(OWN_KEY)
    if own is None:
        states["progress"] = _lightning_progress(checkpoint)
        scaler = checkpoint.get("MixedPrecision") or checkpoint.get("MixedPrecisionPlugin")
        if scaler:
            states["precision"] = scaler
        return Content(states, extra, is_foreign=True)
    if own["schema"] > SCHEMA_VERSION:
        raise CheckpointError(
            f"{source} has the schema version {own['schema']}, this Loopwright reads up to {SCHEMA_VERSION}; "
            f"Loopwright {own['versions']['loopwright']} wrote it.",
            fix="install that version or a newer one.",
        )
    states.update({name: own[name] for name in _OWN_STATES if name in own})
    return Content(states, extra)


def _lightning_progress(checkpoint: Mapping[str, Any]) -> StateDict:
    """Return the counts in a Lightning checkpoint: the epoch counter of its loops, and its global step."""
    loop = checkpoint.get("loops", {}).get("fit_loop", {})
    current = loop.get("epoch_progress", {}).get("current", {})
    batches = loop.get("epoch_loop.batch_progress", {})
    is_last = bool(batches.get("is_last_batch", True))
    completed = int(current.get("completed", checkpoint.get("epoch", 0)))
    # Saved in on_train_epoch_end or in the validation before it: the epoch's batches are all done.
    if is_last and int(current.get("processed", completed)) > completed:
        completed += 1
    return {
        "epochs": completed,
        "steps": int(checkpoint.get("global_step", 0)),
        "batches_in_epoch": 0 if is_last else int(batches.get("current", {}).get("processed", 0)),
        "total_batches": int(batches.get("total", {}).get("processed", 0)),
        "epoch_open": not is_last,
    }


def fit_by_name(state: Mapping[str, Any], groups: Sequence[Sequence[str]]) -> StateDict:
    """Return a state with the parameters that an optimizer has, in its order.

    What does not fit, or has no names, comes as it is: the optimizer says what is wrong with it.

    Args:
        state: In torch's layout.
        groups: Names of the optimizer's parameters, by group.
    """
    saved = state.get("param_groups")
    if not isinstance(saved, list) or len(saved) != len(groups) or not all(PARAM_NAMES in group for group in saved):
        return dict(state)
    known = [dict(zip(group[PARAM_NAMES], group["params"], strict=True)) for group in saved]
    if any(set(one) - set(members) for one, members in zip(known, groups, strict=True)):
        return dict(state)
    numbers: dict[str, int] = {}
    entries = {}
    fitted = []
    for group, one, members in zip(saved, known, groups, strict=True):
        own = {key: value for key, value in group.items() if key not in ("params", PARAM_NAMES)}
        own["params"] = [numbers.setdefault(name, len(numbers)) for name in members]
        fitted.append(own)
        for name in members:
            if name in one and one[name] in state["state"]:
                entries[numbers[name]] = state["state"][one[name]]
    return {**state, "state": entries, "param_groups": fitted}
