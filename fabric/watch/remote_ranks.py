"""Remote ranks: ranks on other machines, which are observed through their heartbeats only."""

from __future__ import annotations

from .failure_store import FailureStore
from .peers import Peer


class RemoteRanks:
    """Detects machines that fell silent, in a ring: a rank observes the next one, if that is on another machine.

    So each machine is observed from another one, whatever the number of ranks, at one read per second. Of neighbors
    that fall silent together, the first is observed by a machine that answers.
    """

    def __init__(self, failure_store: FailureStore, *, rank: int, size: int) -> None:
        self._failure_store = failure_store
        self._next = (rank + 1) % size
        self._has_next: bool | None = None  # on another machine; None: not all ranks are here yet
        self._peer: Peer | None = None
        self._beats: dict[int, tuple[int, float]] = {}

    def peer(self, rank: int) -> Peer | None:
        """Return a rank of another machine that this rank observes; None for others."""
        return self._peer if self._peer is not None and self._peer.rank == rank else None

    def find_silent(self, me: Peer | None, now: float, *, after_s: float) -> Peer | None:
        """Return a rank whose machine has sent no heartbeat for `after_s`; None if there is none.

        Args:
            me: This rank; None before it has published its process.
            now: `time.monotonic()`.
            after_s: Seconds without a heartbeat.
        """
        if self._has_next is False or (self._has_next is None and not self._find(me)):
            return None
        peer = self._peer
        assert peer is not None
        # Others of its machine are observed from a tenth of the time on.
        if not self._is_silent([peer.rank], now, after_s / 10):
            self._beats = {rank: beat for rank, beat in self._beats.items() if rank == peer.rank}
            return None
        # While another rank of the machine answers, the machine is alive, and observes its processes itself.
        of_machine = [other.rank for other in self._failure_store.peers_of(peer.machine)]
        return peer if self._is_silent(of_machine, now, after_s) else None

    def _is_silent(self, ranks: list[int], now: float, after_s: float) -> bool:
        """Note new heartbeats of ranks; return whether none of them has sent one for so long."""
        for rank, (count, _) in self._failure_store.beats(ranks).items():
            if rank not in self._beats or count != self._beats[rank][0]:
                self._beats[rank] = (count, now)
        return all(now - self._beats[rank][1] > after_s for rank in ranks)

    def _find(self, me: Peer | None) -> bool:
        if me is None or not self._failure_store.all_are_here():
            return False
        peer = self._failure_store.peer(self._next)
        self._has_next = peer is not None and peer.machine != me.machine
        self._peer = peer if self._has_next else None
        return self._has_next
