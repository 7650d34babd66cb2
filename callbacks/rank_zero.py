"""Decisions of rank 0 that all ranks follow.

Decisions that depend on files, clocks or random numbers are made once: ranks that decide differently wait forever.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar, cast

from ..errors import LoopwrightError

if TYPE_CHECKING:
    from ..strategies import Strategy

R = TypeVar("R")


def decided_on_rank_zero(strategy: Strategy, decide: Callable[[], R]) -> R:
    """Call the function on rank 0 and return what it returned, on every rank. Called on every rank: it communicates.

    Args:
        strategy: Connects the ranks.
        decide: The function; called on rank 0 only. Its result must be picklable.

    Raises:
        Exception: What the function raised, on rank 0. Other ranks raise the same error if it is one of Loopwright's,
            else a RankFailure with its text, so that no rank waits for a failed one.
    """
    result: R | None = None
    error: Exception | None = None
    if strategy.is_global_zero:
        try:
            result = decide()
        except Exception as caught:  # raised below, when the other ranks know of it
            error = caught
    answer, reported = strategy.broadcast((result, None if error is None else _portable(error)))
    if error is not None:
        raise error
    if reported is not None:
        reported.add_note("This was raised on rank 0; all ranks stop.")
        raise reported
    return cast(R, answer)


def _portable(error: Exception) -> Exception:
    if isinstance(error, LoopwrightError):
        return error
    from ..fabric.failure import Failure

    return Failure.of(error, rank=0).to_error()


class SharedDeadline:
    """A deadline by rank 0's clock that all ranks see at the same step, without communication at each step.

    After each exchange the next one is due halfway to the deadline, by the pace of the latest steps: an hour takes
    about twenty exchanges. If steps become much slower, the deadline is noticed late, by at most half of the remaining
    time.

    Args:
        seconds_left: Function that returns the seconds until the deadline, negative after it; called on rank 0 only.
    """

    def __init__(self, seconds_left: Callable[[], float]) -> None:
        self._seconds_left = seconds_left
        self._look_at = -1
        self._last: tuple[int, float] | None = None

    def has_come(self, strategy: Strategy, step: int) -> bool:
        """Whether the time has come. Called on every rank with the same steps, which grow from call to call."""
        if step < self._look_at:
            return False
        has_come, wait = decided_on_rank_zero(strategy, lambda: self._look(step))
        self._look_at = step + wait
        return has_come

    def _look(self, step: int) -> tuple[bool, int]:
        now, left_s = time.monotonic(), self._seconds_left()
        last, self._last = self._last, (step, now)
        if left_s <= 0 or last is None or step <= last[0]:
            return left_s <= 0, 1
        step_s = max((now - last[1]) / (step - last[0]), 1e-9)
        return False, max(1, int(left_s / step_s / 2))
