"""Functions run on all ranks, whose errors are raised on all ranks, so that none waits for a failed one."""

from __future__ import annotations

import pickle
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from ..errors import LaunchError
from ..strategies import Strategy
from ..strategies.distributed import rendezvous

R = TypeVar("R")

_LONGEST_PAUSE_S = 0.25


def run_on_all_ranks(strategy: Strategy, function: Callable[[], R]) -> R:
    """Call the function on every rank, and return its result if it succeeded on all.

    Called on every rank: it communicates. All ranks must leave a failure in the same way, or those that continue would
    wait forever for the one that failed.

    Args:
        strategy: Connects the ranks.
        function: The function, whose error may differ between ranks.

    Raises:
        Exception: On a failed rank its own error; on the others that of the first failed rank, of the same type if it
            can be pickled, with a note that names the rank.
    """
    result: R | None = None
    error: Exception | None = None
    try:
        result = function()
    except Exception as caught:  # raised below, after all ranks were notified
        error = caught
    _raise_same(strategy, error)
    return result  # type: ignore[return-value]  # without an error it is what the function returned


@contextmanager
def first_then_rest(strategy: Strategy, *, is_first: bool) -> Iterator[None]:
    """Run the block on the first ranks, then on all others; not on the others if a first rank fails.

    Called on every rank: it communicates.

    Args:
        strategy: Connects the ranks.
        is_first: Whether this rank does not wait.

    Raises:
        Exception: The error of a first rank's block, on every rank.
    """
    name = f"first/{strategy.broadcast(uuid.uuid4().hex)}"
    if is_first:
        _add(f"{name}/first")
    _add(f"{name}/here")
    if not is_first:
        _wait(name, strategy.world_size)
        _raise_same(strategy, None)
        yield
        return
    error: Exception | None = None
    try:
        yield
    except Exception as caught:  # raised below, after all ranks were notified
        error = caught
    _add(f"{name}/done")
    _wait(name, strategy.world_size)
    _raise_same(strategy, error)


# The first ranks' work, such as a download, may take longer than a collective's time-out: the others poll the store.


def _add(key: str) -> None:
    store = rendezvous.store()
    if store is not None:
        store.add(key, 1)


def _wait(name: str, size: int) -> None:
    """Wait until all ranks are here, so that the number of first ones is known, and these are done."""
    store = rendezvous.store()
    pause_s = 0.001
    while store is not None:
        here, first, done = (store.add(f"{name}/{key}", 0) for key in ("here", "first", "done"))
        if here == size and done == first:
            return
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def _raise_same(strategy: Strategy, error: Exception | None) -> None:
    """Raise on every rank if one has an error."""
    errors = strategy.gather_objects(_portable(error, strategy.global_rank))
    if error is not None:
        raise error
    for rank, other in enumerate(errors):
        if other is not None:
            other.add_note(f"This was raised on rank {rank}; all ranks stop.")
            raise other


def _portable(error: Exception | None, rank: int) -> Exception | None:
    """Return an error that another process can raise."""
    if error is None:
        return None
    try:
        # Some errors can be pickled but not unpickled, as their constructor takes other arguments.
        same = pickle.loads(pickle.dumps(error))
    except Exception:
        same = None
    if type(same) is type(error):
        return error
    return LaunchError(
        f"rank {rank} raised {type(error).__name__}: {error}", fix=f"fix the error in the traceback of rank {rank}."
    )
