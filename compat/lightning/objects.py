"""Objects in checkpoints: Lightning pickles any object in hyperparameters, hooks and states.

In a file they stay objects, for Lightning itself and for programs that read the file with torch.load. In folders of
sharded checkpoints they are marked as trusted.
"""

from __future__ import annotations

import logging
import pickle
from typing import Any

from ...checkpoint import hparams as saved_hparams
from ...checkpoint.hparams import find_containers
from ...checkpoint.plain import Trusted, WithObjects, require_plain, to_plain
from ...data import AttributeDict
from ...errors import CheckpointError
from ...protocols import StateDict

__all__ = ["keep_hyperparameters", "part_hyperparameters", "trust_objects", "with_objects"]

logger = logging.getLogger(__name__)


def with_objects(checkpoint: StateDict) -> StateDict:
    """Return a checkpoint for a file: NumPy numbers become plain numbers, other objects are unchanged.

    Raises:
        CheckpointError: An object cannot be pickled.
    """
    for prefix in ("", "datamodule_"):
        lost = checkpoint.get(saved_hparams.to_pass_key(prefix))
        if lost:
            text = saved_hparams.refusal("load_from_checkpoint", lost)
            hparams = {**checkpoint[f"{prefix}hyper_parameters"], saved_hparams.INSTANTIATOR: text}
            checkpoint = {**checkpoint, f"{prefix}hyper_parameters": hparams}
    marked: StateDict = trust_objects(checkpoint)
    if marked is checkpoint:
        return checkpoint
    return WithObjects((key, _unmarked(value)) for key, value in marked.items())


def _unmarked(value: Any) -> Any:  # Any: a nested checkpoint
    if isinstance(value, Trusted):
        return value.value
    if type(value) is dict:
        return {key: _unmarked(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_unmarked(item) for item in value)
    return value


def trust_objects(value: Any) -> Any:  # Any: a nested checkpoint
    """Return a checkpoint that may be saved: other values are made plain, or marked as trusted.

    A number of numpy becomes a number; any other object comes back with weights_only=False, which Lightning needs for
    it, too. What is plain already is not copied.
    """
    if _is_plain(value):
        return value
    if type(value) in (dict, AttributeDict):
        return {key: trust_objects(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(trust_objects(item) for item in value)
    return value.item() if _is_number(value) else Trusted(value)


def keep_hyperparameters(owner: object, prefix: str) -> dict[str, object]:  # a module or data module, and its arguments
    """Return a module's entries of a checkpoint, in which objects stay objects; what cannot be pickled is left out.

    Lightning stores them like this, and hooks and libraries read them there and in the file.

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
        if not _is_plain(value) and not find_containers({name: value}) and _can_pickle(value):
            kept[name] = value.item() if _is_number(value) else value
        elif not left_out:
            kept.update(plain)
        else:
            dropped += left_out
    if dropped:
        logger.warning(
            "hyperparameters that cannot be pickled are not saved: %s; pass them to load_from_checkpoint",
            ", ".join(dropped),
        )
    lost = {name: saved_hparams.describe(hparams[name]) for name in dict(hparams) if name not in kept}
    return saved_hparams.entries(owner, prefix, kept, lost)


def part_hyperparameters(checkpoint: StateDict) -> StateDict:
    """Return a checkpoint whose hyperparameters are plain; objects stand beside them, marked as trusted.

    Other readers would mistake the mark for the argument: see checkpoint/hparams.py.
    """
    parted = dict(checkpoint)
    for prefix in ("", "datamodule_"):
        hparams = checkpoint.get(f"{prefix}hyper_parameters")
        if not isinstance(hparams, dict):
            continue
        key = saved_hparams.to_pass_key(prefix)
        plain, objects = saved_hparams.split(hparams, owner="load_from_checkpoint", lost=checkpoint.get(key, {}))
        trusted = {name: Trusted(hparams[name]) for name in objects if name in hparams}
        if objects:
            parted.update({f"{prefix}hyper_parameters": plain, key: objects})
        if trusted:
            parted[saved_hparams.trusted_key(prefix)] = trusted
    return parted


def _is_plain(value: object) -> bool:
    try:
        require_plain(value)
    except CheckpointError:
        return False
    return True


def _is_number(value: Any) -> bool:  # Any: a number of numpy, which may be absent
    return type(value).__module__ == "numpy" and hasattr(value, "item") and getattr(value, "ndim", None) == 0


def _can_pickle(value: object) -> bool:
    try:
        pickle.dumps(value)
    except (pickle.PicklingError, TypeError, AttributeError, RecursionError):
        return False
    return True
