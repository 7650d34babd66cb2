"""What all ranks go through together, so that an error of one is everyone's and nobody waits for it."""

from __future__ import annotations

import pickle
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

from ..errors import LaunchError
from ..strategies import Strategy
from ..strategies.distributed import rendezvous

__all__ = ["first_then_rest", "together"]

R = TypeVar("R")

_LONGEST_PAUSE_S = 0.25


def together(strategy: Strategy, function: Callable[[], R]) -> R:
    """Call the function on every rank, and return what it returned if it succeeded on all.

    Called on every rank: it communicates. All ranks have to come out of a failure in the same way, or those that went
    on would wait for ever for the one that did not.

    Args:
        strategy: Connects the ranks.
        function: What it raises may differ from rank to rank.

    Raises:
        Exception: Its own error on each rank that failed; on the others, that of the first one that failed, of the
            same type where it can travel between processes, with a note that names the rank.
    """
    result: R | None = None
    error: Exception | None = None
    try:
        result = function()
    except Exception as caught:  # raised below, when all ranks know of it
        error = caught
    _raise_same(strategy, error)
    return result  # type: ignore[return-value]  # without an error it is what the function returned


@contextmanager
def first_then_rest(strategy: Strategy, *, is_first: bool) -> Iterator[None]:
    """Run the block on those ranks that are first, then on all others; if it fails on a first one, on no other.

    Called on every rank: it communicates.

    Args:
        strategy: Connects the ranks.
        is_first: Whether this rank does not wait.

    Raises:
        Exception: What a first rank's block raised, on every rank.
    """
    everyone = strategy.gather_objects((is_first, uuid.uuid4().hex))
    keys = {rank: f"first/{everyone[0][1]}/{rank}" for rank, (goes_first, _) in enumerate(everyone) if goes_first}
    if not is_first:
        _wait(keys)
        _raise_same(strategy, None)
        yield
        return
    error: Exception | None = None
    try:
        yield
    except Exception as caught:  # raised below, when all ranks know of it
        error = caught
    _tell(keys[strategy.global_rank])
    _wait(keys)
    _raise_same(strategy, error)


# What the first ranks do, a download say, may take longer than a collective may: so the others look into the store.


def _tell(key: str) -> None:
    store = rendezvous.store()
    if store is not None:
        store.set(key, "1")


def _wait(keys: Mapping[int, str]) -> None:
    store = rendezvous.store()
    pause_s = 0.001
    while store is not None and not store.check(list(keys.values())):
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def _raise_same(strategy: Strategy, error: Exception | None) -> None:
    """Raise on every rank if there is an error on one."""
    errors = strategy.gather_objects(_portable(error, strategy.global_rank))
    if error is not None:
        raise error
    for rank, other in enumerate(errors):
        if other is not None:
            other.add_note(f"This was raised on rank {rank}; the ranks stop together.")
            raise other


def _portable(error: Exception | None, rank: int) -> Exception | None:
    """Return the error in a form that another process can raise."""
    if error is None:
        return None
    try:
        # Some errors can be pickled and not be made again, as their constructor takes other arguments.
        same = pickle.loads(pickle.dumps(error))
    except Exception:
        same = None
    if type(same) is type(error):
        return error
    return LaunchError(
        f"rank {rank} raised {type(error).__name__}: {error}", fix=f"look at the traceback of rank {rank}."
    )
