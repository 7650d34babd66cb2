"""Stop coordinator: the ranks agree on the step after which a run stops, without a collective.

A *phase* is one training window or one evaluation. All ranks go through the same sequence of phases, but not at the
same time. A stop request (a signal, `should_stop`) comes on any rank at any moment. A rank that stopped immediately
would leave the others in the next collective; a collective in each step to find out costs a round trip per step. So:

    position   (phase, batch): where a rank's main thread is. It only grows, and it changes under a lock.
    request    A rank that wants to stop notifies all ranks (one key). Each rank that sees the request publishes its
               position: its *ack*. From then on its main thread does not pass this position until the stop step is
               known.
    stop step  Acks are combined in groups (store_tree.py); the last rank to ack publishes the greatest position of
               all: the stop step.
    continue   Each rank continues while its next position is not past the stop step, and stops there.

All ranks stop at the same place: an ack is the rank's position at the moment from which it waits, so no rank is past
the stop step when it is published. Each rank reaches it, because all ranks take part in every collective up to there,
and none goes further. The protocol terminates: acks are written by each rank's watch thread, which needs nothing from
its main thread but the lock. If all ranks request a stop at the same boundary, that boundary is the stop step: no step
is added.

In an evaluation the ranks may have different numbers of batches. `within` counts batches, and `end` comes after the
last one. All batches up to the stop step are completed on the ranks that have them. A rank that runs out of batches
before the stop step stops before `end`, since the others do not reach the code after it.

No rank may enter a collective between the end of a phase and the next `begin`, where the others may stop. What follows
a step (its events, a checkpoint) belongs to its phase; what precedes one belongs after `begin`.

The main thread never accesses the store: a store that hangs must not make a step hang. A *generation* is one agreement;
a coordinator that has stopped is used again after `reset`.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ...errors import RankFailure
from ...strategies.distributed.store_tree import StoreTree

if TYPE_CHECKING:
    from .failure_store import Store

_SHIFT = 32
_END = (1 << _SHIFT) - 1
_MOST_NAMED = 16
_NAMING_S = 2.0
_STRENGTH = {"should_stop": 0, "SIGINT": 2, "SIGTERM": 3}


class StopCoordinator:
    """Decides before each phase whether this rank continues or stops; the decision is the same on all ranks.

    Args:
        store: A torch.distributed store that only this coordinator's (or its watch's) thread uses; None for one rank.
        rank: This rank.
        size: Number of ranks.
        wake: Called when there is something to exchange, so that the thread that calls `poll` does so soon.
        timeout_s: Seconds that `begin` waits for the agreement before it fails.

    Attributes:
        reason: Why the run stops, equal on all ranks: the strongest of the requests. None before the agreement.
        has_stopped: Whether this rank has stopped.
        notify: Called by `poll` to make the other ranks poll; None if they poll regularly.
    """

    def __init__(
        self,
        store: Store | None,
        *,
        rank: int,
        size: int,
        wake: Callable[[], None] | None = None,
        timeout_s: float = 1800.0,
    ) -> None:
        self.reason: str | None = None
        self.has_stopped = False
        self.wake = wake
        self.notify: Callable[[], None] | None = None
        self._store: Store = store  # type: ignore[assignment]  # None with one rank, which does not poll
        self._rank = rank
        self._size = size
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._generation = 0
        # All below is read and written under the lock. Only the main thread moves; only the thread that polls posts.
        self._phase = 0
        self._batch = 0
        self._is_held = False  # whether the main thread has to look closer: requested, or failed
        self._is_requested = False
        self._requested_reason: str | None = None
        self._ack = 0
        self._has_posted = False
        self._stop_step: int | None = None
        self._error: RankFailure | None = None
        self._missing: list[int] | None = None  # looked up only for an error
        self._wants_missing = False
        self._has_new_generation = False  # whether a request of this generation may have been missed

    # --- the main thread ---------------------------------------------------------------------------------------------

    def begin(self) -> bool:
        """Begin the next phase, unless the run stops here; called on every rank, at the same places of the program.

        Costs a lock and an addition without a stop request; afterwards it may wait for the other ranks' threads.

        Returns:
            Whether to continue; False: the run stops here, before the phase.

        Raises:
            RankFailure: Another rank failed, or does not answer.
        """
        with self._lock:
            if not self._is_held:
                self._phase += 1
                self._batch = 0
                return True
        return self._advance(self._phase + 1, 0)

    def within(self) -> bool:
        """Begin this rank's next batch of the evaluation that is the current phase, unless the run stops here.

        Returns:
            Whether to continue; False: the run stops here, in the evaluation.

        Raises:
            RankFailure: See `begin`.
        """
        with self._lock:
            if not self._is_held:
                self._batch += 1
                return True
        return self._advance(self._phase, self._batch + 1)

    def end(self) -> bool:
        """End an evaluation, after this rank's last batch and before the next collective, unless the run stops here.

        Returns:
            Whether to continue; False: the run stops here, and the evaluation has no result.

        Raises:
            RankFailure: See `begin`.
        """
        with self._lock:
            if not self._is_held:
                self._batch = _END
                return True
        return self._advance(self._phase, _END)

    def _advance(self, phase: int, batch: int) -> bool:
        """Move to this position if the stop step allows it; wait until there is one."""
        ends = time.monotonic() + self._timeout_s
        while True:
            with self._changed:
                verdict = self._decide(phase, batch)
                if verdict is not None:
                    return verdict
                # Woken by `poll`. Bounded, so that a signal's handler gets to run on any platform.
                self._changed.wait(0.1)
            if time.monotonic() > ends:
                # The thread that polls may find out who is missing, and the main thread must not.
                self._wants_missing = True
                if self._missing is not None or time.monotonic() > ends + _NAMING_S:
                    raise self._no_agreement()

    def _decide(self, phase: int, batch: int) -> bool | None:
        """Return whether to move there; None while the stop step is unknown. The lock is held."""
        if self._error is not None:
            raise self._error
        if self._is_requested:
            if self._stop_step is None:
                return None
            if phase << _SHIFT | batch > self._stop_step:
                self.has_stopped = True
                return False
        self._phase, self._batch = phase, batch
        return True

    def _no_agreement(self) -> RankFailure:
        missing = ", ".join(map(str, self._missing or ())) or "unknown"
        return RankFailure(
            "Expected an answer of every rank on where to stop "
            f"({self._requested_reason or 'requested by another rank'}), but some ranks did not answer within "
            f"{self._timeout_s:.0f} s; missing: {missing}.",
            fix="check what those ranks do; their hosts may be down, or a C function may block Python.",
        )

    # --- any thread; not a signal handler, which might interrupt the holder of the lock ------------------------------

    def request(self, reason: str) -> None:
        """Request a stop of all ranks at the earliest common position.

        Args:
            reason: "should_stop", "SIGINT", "SIGTERM", or another signal's name; SIGTERM outweighs SIGINT, and signals
                outweigh all else.
        """
        with self._changed:
            if self._requested_reason is None or _strength(reason) > _strength(self._requested_reason):
                self._requested_reason = reason
            self._hold()
        if self.wake is not None:
            self.wake()

    def _hold(self) -> None:
        """Record this rank's position, which it does not pass without a stop step. The lock is held."""
        if self._is_requested:
            return
        self._is_requested = self._is_held = True
        self._ack = self._phase << _SHIFT | self._batch
        if self._size == 1:
            self._stop_step, self.reason = self._ack, self._requested_reason
            self._changed.notify_all()

    def reset(self) -> None:
        """Start a new generation after a stop; called on every rank before the next run. Otherwise do nothing.

        A request stronger than the reason for the stop is still open: it is made again.
        """
        with self._changed:
            if not self.has_stopped:
                return
            unanswered = self._requested_reason
            if unanswered is not None and _strength(unanswered) <= _strength(self.reason):
                unanswered = None
            self._generation += 1
            self._has_new_generation = True
            self._is_requested = self._has_posted = self.has_stopped = False
            self._is_held = self._error is not None
            self._missing, self._wants_missing = None, False
            self._stop_step = self._requested_reason = self.reason = None
            if unanswered is not None:
                self._requested_reason = unanswered
                self._hold()
        if self.wake is not None:
            self.wake()

    def fail(self, error: RankFailure) -> None:
        """Abandon the agreement: every present and future wait for it raises this error."""
        with self._changed:
            self._error = error
            self._is_held = True
            self._changed.notify_all()

    def revive(self) -> None:
        """Withdraw `fail`, after an error that all ranks raised."""
        with self._changed:
            self._error = None
            self._is_held = self._is_requested

    @property
    def position(self) -> tuple[int, int]:
        """Number of begun phases and of batches in the current evaluation, which shows whether a rank moves."""
        return self._phase, self._batch

    @property
    def is_under_way(self) -> bool:
        """Whether an agreement has begun and has not ended, so that `poll` is to be called often."""
        return self._is_requested and self._stop_step is None and self._error is None

    @property
    def needs_poll(self) -> bool:
        """Whether `poll` is to be called although no other rank sent a notification.

        A rank that was reset earlier may have requested a stop while this one was still in the previous generation,
        whose `poll` does not look for it.
        """
        return self._has_new_generation or self.is_under_way

    # --- the thread that polls ---------------------------------------------------------------------------------------

    def poll(self) -> bool:
        """Exchange requests, acks and the stop step with the store; called repeatedly by one thread.

        Returns:
            Whether the agreement is under way, so that the next call should come soon.
        """
        if self._size == 1:
            return False
        with self._lock:
            # A reset comes only after the stop step, so that what is read here stays true until there is one.
            key = str(self._generation)
            self._has_new_generation = False
            if self._stop_step is not None or self._error is not None:
                return False
            is_requested, has_posted = self._is_requested, self._has_posted
        if is_requested and not has_posted:
            self._store.set(f"{key}/requested", "1")
            if self.notify is not None:
                self.notify()
        elif not has_posted and not self._store.check([f"{key}/requested"]):
            return False
        self._post_ack(key)
        if not self._store.check([f"{key}/stop_step"]):
            if self._wants_missing:
                missing = self._acks(key).missing(_MOST_NAMED)
                with self._changed:
                    self._missing = missing
                    self._changed.notify_all()
            return True
        stop_step, reason = json.loads(self._store.get(f"{key}/stop_step"))
        with self._changed:
            self._stop_step, self.reason = stop_step, reason
            self._changed.notify_all()
        return False

    def close(self) -> None:
        """Publish the position of a rank that ends, which does not change any more. The polling thread calls it last.

        It does not request a stop: an ack alone does not.
        """
        if self._size == 1:
            return
        with self._changed:
            key = str(self._generation)
            self._hold()
        self._post_ack(key)

    def _post_ack(self, key: str) -> None:
        """Publish this rank's position, once; the last rank to do so publishes the stop step."""
        with self._changed:
            self._hold()
            if self._has_posted:
                return
            self._has_posted = True
            ack, reason = self._ack, self._requested_reason
        stop = self._acks(key).post(self._rank, json.dumps([ack, reason]), _furthest)
        if stop is not None:
            self._store.set(f"{key}/stop_step", stop)

    def _acks(self, key: str) -> StoreTree:
        return StoreTree(self._store, f"{key}/ack", self._size)


def _furthest(acks: Sequence[bytes]) -> str:
    """Return the ack of several ranks: the greatest position, and the strongest reason."""
    found = [json.loads(ack) for ack in acks]
    return json.dumps([max(ack for ack, _ in found), max((reason for _, reason in found), key=_strength)])


def _strength(reason: str | None) -> int:
    if reason is None:
        return -1
    return _STRENGTH.get(reason, 1 if reason.startswith("SIG") else 0)
