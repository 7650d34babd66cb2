"""Counts, without a collective, the ranks that had no loss in a window."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from ..distributed.rendezvous import store


def note_absence(window: str, device: torch.device) -> Callable[[], int] | None:
    """Note in the store of all ranks that this one had no loss; see `NotesAbsence.note_absence`.

    Each rank that has none notes it before the backward pass that reduces gradients. Once this rank has been through
    the reduction, all others have entered it: the number is final. Ranks that had a loss do nothing.
    """
    shared = store()
    if shared is None:
        return None
    key = f"loopwright/absent/{window}"
    shared.add(key, 1)

    @functools.cache  # the key is gone once all ranks have read it
    def count() -> int:
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # there a backward pass returns before the reduction is done
        number: int = shared.add(key, 0)
        if shared.add(f"{key}/read", 1) == number:  # the last one clears up
            shared.delete_key(f"{key}/read")
            shared.delete_key(key)
        return number

    return count
