"""Objects in checkpoints: Lightning pickles whatever hooks and states hold, Loopwright wants to be told that it may."""

from __future__ import annotations

from typing import Any

from ...checkpoint.plain import require_plain, to_plain
from ...checkpoint.trusted import Trusted
from ...errors import CheckpointError

__all__ = ["trust_objects"]


def trust_objects(value: Any) -> Any:  # Any: a nested checkpoint
    """Return a checkpoint that may be saved: what is no plain value is made one, or marked as trusted.

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
