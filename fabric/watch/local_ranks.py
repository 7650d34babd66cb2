"""`LocalRanks`: the processes of this machine, and which of them have ended."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from ..failure import describe_exit
from .crash_file import read_crash
from .peers import Peer

_EXIT_CODE_S = 0.5  # for a rank that knows the exit code, before "it ended without a report" is stored


class ProcessStarter(Protocol):
    """What the watch needs of the launcher that started this machine's processes from this one."""

    def local_exits(self) -> dict[int, int]:
        """Return exit codes of ended processes by local rank; negative for a signal."""
        ...

    def kill(self, signum: int) -> None:
        """Send a signal to the processes that still run."""
        ...


class LocalRanks:
    """The other ranks of this machine.

    Args:
        launcher: Knows the exit codes; None without one.
    """

    def __init__(self, launcher: ProcessStarter | None) -> None:
        self._launcher = launcher
        self._peers: dict[int, Peer] = {}
        self._gone: dict[int, float] = {}

    @property
    def num_gone(self) -> int:
        """Number of ranks whose process has ended."""
        return len(self._gone)

    def add(self, peers: Iterable[Peer]) -> None:
        """Observe these ranks from now on."""
        self._peers.update({peer.rank: peer for peer in peers})

    def peer(self, rank: int) -> Peer | None:
        """Return a rank that is observed; None if it is not, or not any more."""
        return self._peers.get(rank)

    def peers(self) -> Iterable[Peer]:
        """Return the ranks that are observed."""
        return self._peers.values()

    def note_ended(self, now: float) -> bool:
        """Find processes that have ended since the last call, and return whether there are any.

        Args:
            now: Time of `time.monotonic`, in seconds.
        """
        ended = [rank for rank, peer in self._peers.items() if rank not in self._gone and peer.state() == "gone"]
        self._gone.update(dict.fromkeys(ended, now))
        return bool(ended)

    def lost(self, now: float, is_settled: Callable[[Peer], bool]) -> Iterator[tuple[Peer, str, str]]:
        """Yield each rank that has ended without a report, how it ended, and its stack; each once.

        A rank is yielded when its exit code or its crash is known, or after half a second without either.

        Args:
            now: Time of `time.monotonic`, in seconds.
            is_settled: Returns whether the end of a rank is not a failure, or another failure is known already; asked
                immediately before a rank is yielded.
        """
        for rank, since in list(self._gone.items()):
            peer = self._peers.get(rank)
            if peer is None:
                continue
            if is_settled(peer):
                del self._peers[rank]
                continue
            crash, trace = read_crash(peer.crash_file, peer.thread)
            how = self._exit_of(peer)
            if crash:
                how = crash if how is None else f"{how}: {crash}"
            if how is None and now < since + _EXIT_CODE_S:
                continue
            del self._peers[rank]
            yield peer, how or "the process ended without a report (killed, out of memory, or os._exit)", trace

    def _exit_of(self, peer: Peer) -> str | None:
        if self._launcher is None:
            return None
        code = self._launcher.local_exits().get(peer.local_rank)
        return None if code is None else describe_exit(code)
