"""Objects in checkpoints: Lightning pickles any object in hooks and states; Loopwright requires them to be trusted."""

from __future__ import annotations

import logging
import pickle
from typing import Any

from ...checkpoint import arguments_to_pass
from ...checkpoint.plain import Trusted, require_plain, to_plain
from ...errors import CheckpointError
from ...protocols import StateDict

__all__ = ["keep_hyperparameters", "part_hyperparameters", "trust_objects"]

logger = logging.getLogger(__name__)


def trust_objects(value: Any) -> Any:  # Any: a nested checkpoint
    """Return a checkpoint that may be saved: other values are made plain, or marked as trusted.

    A number of numpy becomes a number; any other object comes back with weights_only=False, which Lightning needs for
    it, too. What is plain already is not copied.
    """
    try:
        require_plain(value)
    except CheckpointError:
        if type(value) is dict:
            return {key: trust_objects(item) for key, item in value.items()}
        if type(value) in (list, tuple):
            return type(value)(trust_objects(item) for item in value)
        plain, left_out = to_plain(value)
        return Trusted(value) if left_out else plain
    return value


def keep_hyperparameters(owner: object, prefix: str) -> dict[str, object]:  # a module or data module, and its arguments
    """Return a module's entries of a checkpoint, in which objects stay objects; what cannot be pickled is left out.

    Lightning keeps them so, and hooks and libraries look for them there. `trust_objects` marks them when it is written.

    Args:
        owner: The module or data module.
        prefix: How the keys begin; empty for a module.
    """
    hparams = getattr(owner, "hparams", None)
    if not hparams:
        return {}
    kept, dropped = {}, []
    for name, value in dict(hparams).items():
        plain, left_out = to_plain({name: value})
        if not left_out:
            kept.update(plain)
        elif _can_pickle(value):
            kept[name] = value
        else:
            dropped += left_out
    if dropped:
        logger.warning(
            "hyperparameters that cannot be pickled are not saved: %s; pass them to load_from_checkpoint",
            ", ".join(dropped),
        )
    name_key = "datamodule_hparams_name" if prefix else "hparams_name"
    value_key = "datamodule_hyper_parameters" if prefix else "hyper_parameters"
    found = {name_key: getattr(owner, "_hparams_name", None) or "kwargs", value_key: kept}
    lost = {name: arguments_to_pass.describe(hparams[name]) for name in dict(hparams) if name not in kept}
    return {**found, arguments_to_pass.to_pass_key(prefix): lost} if lost else found


def part_hyperparameters(checkpoint: StateDict) -> StateDict:
    """Return a checkpoint whose hyperparameters are plain; objects stand beside them, marked as trusted.

    Other readers would take the mark for the argument: see checkpoint/arguments_to_pass.py.
    """
    parted = dict(checkpoint)
    for prefix in ("", "datamodule_"):
        hparams = checkpoint.get(f"{prefix}hyper_parameters")
        if not isinstance(hparams, dict):
            continue
        key = arguments_to_pass.to_pass_key(prefix)
        plain, objects = arguments_to_pass.split(hparams, owner="load_from_checkpoint", lost=checkpoint.get(key, {}))
        trusted = {name: Trusted(hparams[name]) for name in objects if name in hparams}
        if objects:
            parted.update({f"{prefix}hyper_parameters": plain, key: objects})
        if trusted:
            parted[arguments_to_pass.trusted_key(prefix)] = trusted
    return parted


def _can_pickle(value: object) -> bool:
    try:
        pickle.dumps(value)
    except (pickle.PicklingError, TypeError, AttributeError, RecursionError):
        return False
    return True
