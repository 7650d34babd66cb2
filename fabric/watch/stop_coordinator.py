"""Agrees with the other ranks on where a run stops, without a collective.

A *segment* is one training window or one evaluation; all ranks go through the same sequence of segments, but not at the
same time. A request to stop (a signal, `should_stop`) comes on any rank at any moment. A rank that simply stopped would
leave the others for ever in the next collective; one collective per step that asks costs a round trip each time. So:

    position   (segment, batch): where a rank's main thread is. It only grows, and it changes under a lock.
    ask        A rank that wants to stop tells all (one key). It, and each rank that learns of it, writes its position
               down: its *ack*. From then on its main thread does not go past this position before the cut is known.
    cut        The last rank to ack sees that it is the last (an atomic counter), and publishes the greatest position of
               all acks: the cut.
    go on      Each rank goes on as long as its next position is not past the cut, and stops there.

Why all stop at the same place: an ack is the rank's position at the moment from which it waits, so no rank is past the
cut when it is published; each goes on up to it, because whatever it needs of others up to there, they do, too; none
goes further. Why it ends: acks are written by each rank's watch thread, which needs nothing of its main thread but the
lock. If all ranks ask at the same boundary, that boundary is the cut: no step is added.

Inside an evaluation the ranks may have different numbers of batches. `within` counts batches, and `end` comes after the
last: all batches up to the cut are done on the ranks that have them. Whoever runs out of batches before the cut stops
in front of `end`, since the others do not come to what follows it.

No rank may enter a collective between the end of a segment and the next `begin`, which may be where the others stop:
what follows a step (its events, a checkpoint) belongs to its segment, what precedes one belongs after `begin`.

The main thread never talks to the store: a store that hangs must not make a step hang. A *generation* is one agreement;
a gate that stopped is used again after `reset`.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from typing import Any

from ...errors import RankFailure

__all__ = ["StopGate"]

_SHIFT = 32
_END = (1 << _SHIFT) - 1
_STRENGTH = {"should_stop": 0, "SIGINT": 2, "SIGTERM": 3}


class StopGate:
    """Lets a rank go on to its next segment, or says that the run stops here, on all ranks alike.

    Args:
        store: A torch.distributed store that only this gate's (or its watch's) thread uses; None for one rank.
        rank: This rank.
        size: Number of ranks.
        wake: Called when there is something to exchange: makes whoever calls `poll` on this rank do so soon.
        timeout_s: How long `begin` waits for the agreement before it fails.

    Attributes:
        reason: Why the run stops, equal on all ranks: the strongest of what ranks asked for. None before the agreement.
        has_stopped: Whether this rank has been told to stop here.
        ring: Called by `poll` when the other ranks are to poll, too; None: they do anyway.
    """

    def __init__(
        self,
        store: Any,  # Any: importing torch.distributed costs time that one process need not pay
        *,
        rank: int,
        size: int,
        wake: Callable[[], None] | None = None,
        timeout_s: float = 1800.0,
    ) -> None:
        self.reason: str | None = None
        self.has_stopped = False
        self.wake = wake
        self.ring: Callable[[], None] | None = None
        self._store = store
        self._rank = rank
        self._size = size
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._generation = 0
        # All below is read and written under the lock. Only the main thread moves; only the thread that polls posts.
        self._segment = 0
        self._batch = 0
        self._is_held = False  # whether the main thread has to look closer: asked, or failed
        self._is_asked = False
        self._wanted: str | None = None
        self._ack = 0
        self._has_posted = False
        self._cut: int | None = None
        self._error: RankFailure | None = None
        self._missing: list[int] = []
        self._next_look_s = 0.0
        self._has_new_generation = False  # whether a request of this generation may have been overheard

    # --- the main thread ---------------------------------------------------------------------------------------------

    def begin(self) -> bool:
        """Ask to begin the next segment; on every rank, at the same places of the program.

        Costs a lock and an addition while nobody asks for a stop; afterwards it may wait for the other ranks' threads.

        Returns:
            Whether to go on; False: the run stops here, before the segment.

        Raises:
            RankFailure: Another rank failed, or does not answer.
        """
        with self._lock:
            if not self._is_held:
                self._segment += 1
                self._batch = 0
                return True
        return self._advance(self._segment + 1, 0)

    def within(self) -> bool:
        """Ask to go on with this rank's next batch of the evaluation that is the present segment.

        Returns:
            Whether to go on; False: the run stops here, in the evaluation.

        Raises:
            RankFailure: See `begin`.
        """
        with self._lock:
            if not self._is_held:
                self._batch += 1
                return True
        return self._advance(self._segment, self._batch + 1)

    def end(self) -> bool:
        """Ask to end an evaluation, after this rank's last batch and before what all ranks do together.

        Returns:
            Whether to go on; False: the run stops here, and the evaluation has no result.

        Raises:
            RankFailure: See `begin`.
        """
        with self._lock:
            if not self._is_held:
                self._batch = _END
                return True
        return self._advance(self._segment, _END)

    def _advance(self, segment: int, batch: int) -> bool:
        """Go there if the cut allows it; wait until there is one."""
        ends = time.monotonic() + self._timeout_s
        while True:
            with self._changed:
                verdict = self._decide(segment, batch)
                if verdict is not None:
                    return verdict
                # Woken by `poll`. Bounded, so that a signal's handler gets to run on any platform.
                self._changed.wait(0.1)
            if time.monotonic() > ends:
                raise self._no_agreement()

    def _decide(self, segment: int, batch: int) -> bool | None:
        """Return whether to go there, None while that is not known. The lock is held."""
        if self._error is not None:
            raise self._error
        if self._is_asked:
            if self._cut is None:
                return None
            if segment << _SHIFT | batch > self._cut:
                self.has_stopped = True
                return False
        self._segment, self._batch = segment, batch
        return True

    def _no_agreement(self) -> RankFailure:
        missing = ", ".join(map(str, self._missing)) or "unknown"
        return RankFailure(
            f"the ranks were to agree on where to stop ({self._wanted or 'another rank asked'}), but some did not "
            f"answer for {self._timeout_s:.0f} s; missing: {missing}.",
            fix="look at what those ranks do; their hosts may be down, or a C function may not let Python run.",
        )

    # --- any thread; not a signal handler, which might interrupt the holder of the lock ------------------------------

    def request(self, reason: str) -> None:
        """Ask all ranks to stop, as soon as they can do so together.

        Args:
            reason: "should_stop", "SIGINT", "SIGTERM", or another signal's name; SIGTERM outweighs SIGINT, and signals
                outweigh all else.
        """
        with self._changed:
            if self._wanted is None or _strength(reason) > _strength(self._wanted):
                self._wanted = reason
            self._ask()
        if self.wake is not None:
            self.wake()

    def _ask(self) -> None:
        """Note where this rank is, from where it does not go on by itself. The lock is held."""
        if self._is_asked:
            return
        self._is_asked = self._is_held = True
        self._ack = self._segment << _SHIFT | self._batch
        if self._size == 1:
            self._cut, self.reason = self._ack, self._wanted
            self._changed.notify_all()

    def reset(self) -> None:
        """Make a gate that has stopped usable again; on every rank, before the next run begins. Else do nothing.

        A request that is stronger than the reason for the stop was not answered by it: it is made again.
        """
        with self._changed:
            if not self.has_stopped:
                return
            unanswered = self._wanted
            if unanswered is not None and _strength(unanswered) <= _strength(self.reason):
                unanswered = None
            self._generation += 1
            self._has_new_generation = True
            self._is_asked = self._has_posted = self.has_stopped = False
            self._is_held = self._error is not None
            self._cut = self._wanted = self.reason = None
            if unanswered is not None:
                self._wanted = unanswered
                self._ask()
        if self.wake is not None:
            self.wake()

    def fail(self, error: RankFailure) -> None:
        """Give up: whoever waits for the agreement, or will, gets this error."""
        with self._changed:
            self._error = error
            self._is_held = True
            self._changed.notify_all()

    def revive(self) -> None:
        """Take back `fail`, after an error that all ranks had alike."""
        with self._changed:
            self._error = None
            self._is_held = self._is_asked

    @property
    def position(self) -> tuple[int, int]:
        """Segments begun, and batches of the present evaluation: tells a rank that moves from one that is stuck."""
        return self._segment, self._batch

    @property
    def is_under_way(self) -> bool:
        """Whether an agreement has begun and has not ended, so that `poll` is to be called often."""
        return self._is_asked and self._cut is None and self._error is None

    @property
    def needs_poll(self) -> bool:
        """Whether `poll` is to be called although no other rank rang.

        A rank that was reset earlier may have requested a stop and rung while this one was still in the generation
        before, whose `poll` does not look for it.
        """
        return self._has_new_generation or self.is_under_way

    # --- the thread that polls ---------------------------------------------------------------------------------------

    def poll(self) -> bool:
        """Exchange what there is to exchange; called by one thread again and again.

        Returns:
            Whether the agreement is under way, so that the next call should come soon.
        """
        if self._size == 1:
            return False
        with self._lock:
            # A reset comes only after the cut, so that what is read here stays true until there is one.
            key = str(self._generation)
            self._has_new_generation = False
            if self._cut is not None or self._error is not None:
                return False
            asks, has_posted = self._is_asked, self._has_posted
        if asks and not has_posted:
            self._store.set(f"{key}/asked", "1")
            if self.ring is not None:
                self.ring()
        elif not has_posted and not self._store.check([f"{key}/asked"]):
            return False
        self._post_ack(key)
        if not self._store.check([f"{key}/cut"]):
            self._note_missing(key)
            return True
        cut, reason = json.loads(self._store.get(f"{key}/cut"))
        with self._changed:
            self._cut, self.reason, self._missing = cut, reason, []
            self._changed.notify_all()
        return False

    def close(self) -> None:
        """Answer for a rank that ends: it goes nowhere any more. Called by the thread that polls, as its last act.

        It asks nobody to stop: an ack alone does not.
        """
        if self._size == 1:
            return
        with self._changed:
            key = str(self._generation)
            self._ask()
        self._post_ack(key)

    def _post_ack(self, key: str) -> None:
        """Write this rank's position down, once; the last rank to do so publishes the cut."""
        with self._changed:
            self._ask()
            if self._has_posted:
                return
            self._has_posted = True
            ack, wanted = self._ack, self._wanted
        self._store.set(f"{key}/ack/{self._rank}", json.dumps([ack, wanted]))
        # The counter comes after the ack: whoever counts to the end finds all acks there.
        if self._store.add(f"{key}/acks", 1) < self._size:
            return
        acks = [json.loads(self._store.get(f"{key}/ack/{rank}")) for rank in range(self._size)]
        wishes = [wanted for _, wanted in acks if wanted is not None]
        reason = max(wishes, key=_strength) if wishes else None
        self._store.set(f"{key}/cut", json.dumps([max(ack for ack, _ in acks), reason]))

    def _note_missing(self, key: str) -> None:
        """Remember who has not answered, for the message; only now and then, since it asks for each rank."""
        now = time.monotonic()
        if now >= self._next_look_s:
            self._next_look_s = now + 1.0
            self._missing = [rank for rank in range(self._size) if not self._store.check([f"{key}/ack/{rank}"])]


def _strength(reason: str | None) -> int:
    if reason is None:
        return -1
    return _STRENGTH.get(reason, 1 if reason.startswith("SIG") else 0)
