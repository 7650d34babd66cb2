"""Remote ranks: ranks on other machines, which are observed through their heartbeats only."""

from __future__ import annotations

from .failure_store import FailureStore
from .peers import Peer

__all__ = ["RemoteRanks"]


class RemoteRanks:
    """Detects hosts that fell silent. Rank 0 observes all other hosts, rank 1 that of rank 0: n reads, not n²."""

    def __init__(self, failure_store: FailureStore, *, rank: int, size: int) -> None:
        self._failure_store = failure_store
        self._rank = rank
        self._size = size
        self._has_some: bool | None = None  # None: not all ranks are here yet
        self._beats: dict[int, tuple[int, float]] = {}
        self._peers: dict[int, Peer] = {}

    def peer(self, rank: int) -> Peer | None:
        """Return a rank of another machine that this rank observes; None for others."""
        return self._peers.get(rank)

    def find_silent(self, me: Peer | None, now: float, *, after_s: float) -> Peer | None:
        """Return a rank whose machine has sent no heartbeat for `after_s`; None if there is none.

        Args:
            me: This rank; None before it has published its process.
            now: `time.monotonic()`.
            after_s: Seconds without a heartbeat.
        """
        if self._rank > 1 or self._has_some is False or (self._has_some is None and not self._find(me, now)):
            return None
        silent: list[int] = []
        for rank, (count, _) in self._failure_store.beats(sorted(self._beats)).items():
            if count != self._beats[rank][0]:
                self._beats[rank] = (count, now)
            elif now - self._beats[rank][1] > after_s:
                silent.append(rank)
        for rank in silent:
            peer = self._peers[rank]
            # While another rank of the machine answers, the machine is alive, and observes its processes itself.
            if not any(other.machine == peer.machine and r not in silent for r, other in self._peers.items()):
                return peer
        return None

    def _find(self, me: Peer | None, now: float) -> bool:
        if me is None or not self._failure_store.all_are_here():
            return False
        peers = {rank: self._failure_store.peer(rank) for rank in range(self._size)}
        first = peers[0]
        for rank, peer in peers.items():
            if peer is None or first is None or peer.machine == me.machine:
                continue
            if self._rank == 0 or peer.machine == first.machine:
                self._beats[rank], self._peers[rank] = (-1, now), peer
        self._has_some = bool(self._beats)
        return self._has_some
