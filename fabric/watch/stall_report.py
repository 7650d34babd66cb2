"""Stall reports: the status of all ranks when nothing moves or a collective timed out.

The watches of all ranks answer, also while their main threads hang; neighbors answer for ranks that cannot (a C
function that holds the interpreter's lock). The lowest rank that answered prints one report; ranks that requested it
get a copy.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ...messages import show_ranks
from .failure_store import FailureStore
from .peers import Peer
from .rank_status import LastCollective, RankStatus, progress_of_collectives

if TYPE_CHECKING:
    pass

ANSWER_S = 2.0  # for all ranks to answer
_NEIGHBOUR_S = 1.0  # after which neighbors are examined
_STACK_S = 0.5  # for a neighbor to write its stack


@dataclass(frozen=True, slots=True)
class StallReport:
    """The status of all ranks, grouped by what they do.

    Attributes:
        statuses: One per rank, in rank order; `is_silent` for ranks that did not answer.
    """

    statuses: Sequence[RankStatus]

    @property
    def furthest(self) -> LastCollective | None:
        """The last collective of any rank, in the process group that most ranks used last."""
        last = [s.collective for s in self.statuses if s.collective is not None and not s.has_ended]
        groups = [collective.group for collective in last]
        if not groups:
            return None
        group = max(sorted(set(groups)), key=groups.count)
        return max((c for c in last if c.group == group), key=lambda collective: collective.number)

    @property
    def missing(self) -> list[int]:
        """The ranks that others wait for: silent ones, and those behind the others' collective."""
        furthest = self.furthest
        silent = [status.rank for status in self.statuses if status.is_silent]
        if furthest is None:
            return silent
        behind = [s.rank for s in self.statuses if not s.is_silent and _is_behind(s, furthest)]
        return sorted(silent + behind)

    @property
    def mismatched(self) -> dict[str, list[int]]:
        """Different operations called under the same number: operation -> ranks; empty if the ranks match."""
        furthest = self.furthest
        by_name: dict[str, list[int]] = {}
        for status in self.statuses:
            last = status.collective
            if furthest is None or last is None or (last.group, last.number) != (furthest.group, furthest.number):
                continue
            # Of other operations, ranks may have inputs of different shapes.
            name = str(last) if last.name in ("all_reduce", "broadcast") else replace(last, shapes="")
            by_name.setdefault(str(name), []).append(status.rank)
        return by_name if len(by_name) > 1 else {}

    @property
    def culprit(self) -> RankStatus | None:
        """The rank to examine first: a missing one, or one of the minority that called another operation."""
        missing = self.missing
        if missing:
            return self.statuses[missing[0]] if len(missing) < len(self.statuses) else None
        if self.mismatched:
            rank = min(self.mismatched.values(), key=lambda ranks: (len(ranks), -ranks[0]))[0]
            return self.statuses[rank]
        return None

    def groups(self) -> list[list[RankStatus]]:
        """Return ranks that do the same, the smallest group first: it most often holds the cause."""
        by_kind: dict[object, list[RankStatus]] = {}
        for status in self.statuses:
            key = (status.doing, status.collective, status.describe_place(), status.is_silent)
            by_kind.setdefault(key, []).append(status)
        return sorted(by_kind.values(), key=lambda group: (len(group), group[0].rank))

    def summary(self) -> str:
        """Return one line: which ranks wait for which."""
        missing, furthest = self.missing, self.furthest
        if not missing and self.mismatched:
            return "; ".join(f"{show_ranks(ranks)} called {name}" for name, ranks in sorted(self.mismatched.items()))
        if not missing or len(missing) == len(self.statuses):
            return "no rank is behind the others"
        others = [status.rank for status in self.statuses if status.rank not in missing]
        at = f"{furthest}" if furthest is not None else "the others"
        waiting = f"{show_ranks(others)} wait{'s' if len(others) == 1 else ''}"
        return f"{show_ranks(missing)} did not come to {at}, where {waiting}"

    def text(self, why: str) -> str:
        """Return the full report.

        Args:
            why: The reason for the report, as a sentence without a full stop.
        """
        groups = self.groups()
        lines = [f"Loopwright: {why}: {self.summary()}."]
        for group in groups:
            first = group[0]
            place = first.describe_place()
            lines.append(f"  {show_ranks([s.rank for s in group])}{f' ({place})' if place else ''}: {first.doing}")
            who = ", ".join(f"host {s.host} pid {s.pid}" for s in group[:4]) + (", ..." if len(group) > 4 else "")
            last = f"; last collective {first.collective}" if first.collective is not None else ""
            lines.append(f"    {who}{last}")
        for group in groups:
            if group[0].stack:
                lines.append(f"  --- Python stack of {show_ranks([s.rank for s in group])} ---")
                lines.extend("  " + line for entry in group[0].stack for line in entry.rstrip().splitlines())
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class StallFinding:
    """What the ranks that requested a report get of it: the whole has a stack for each rank.

    Attributes:
        summary: See `StallReport.summary`.
        culprit: See `StallReport.culprit`.
    """

    summary: str
    culprit: RankStatus | None

    def to_json(self) -> str:
        """Return it as text."""
        return json.dumps([self.summary, None if self.culprit is None else self.culprit.to_json()])

    @classmethod
    def from_json(cls, text: str) -> StallFinding:
        """Return it from text."""
        summary, culprit = json.loads(text)
        return cls(summary, None if culprit is None else RankStatus.from_json(culprit))


def _is_behind(status: RankStatus, furthest: LastCollective) -> bool:
    collective = status.collective
    if collective is None:
        # One that ended may not be part of a group that is not that of all ranks.
        return not (status.has_ended and furthest.group)
    return collective.group == furthest.group and collective.number < furthest.number


class StallReporter:
    """Collects rank statuses and prints stall reports. Runs on the watch's thread, except `wait_for_finding`.

    Args:
        failure_store: The keys that the ranks share.
        rank: Global rank of this process.
        size: Number of ranks.

    Attributes:
        report: The text of the last report that this rank printed.
    """

    def __init__(self, failure_store: FailureStore, *, rank: int, size: int) -> None:
        self._failure_store = failure_store
        self._rank = rank
        self._size = size
        self.report = ""
        self._progress: object = None
        self._progress_since = 0.0
        self._collectives: object = None
        self._patience = 1
        self._request: _StatusRequest | None = None
        self._requested: set[int] = set()
        self._findings: dict[int, StallFinding] = {}
        self._has_finding = threading.Condition()

    @property
    def is_open(self) -> bool:
        """Whether a status request is open."""
        return self._request is not None

    def moved(self, progress: object, now: float) -> None:
        """Record that this rank made progress, or is not in a run."""
        self._progress, self._progress_since = progress, now
        self._collectives, self._patience = None, 1

    def look_for_progress(self, progress: object, now: float, *, stall_timeout_s: float) -> None:
        """Request a report if this rank has not made progress for too long.

        Args:
            progress: The rank's current position.
            now: `time.monotonic()`.
            stall_timeout_s: Seconds without progress; the next report on the same stall comes after twice the time.
        """
        if progress != self._progress:
            self.moved(progress, now)
            return
        waited_s, limit_s = now - self._progress_since, stall_timeout_s * self._patience
        if self._collectives is None and waited_s >= limit_s / 2:
            self._collectives = progress_of_collectives()
        if waited_s < limit_s:
            return
        if progress_of_collectives() != self._collectives:  # one long step, in which the ranks communicate
            self._progress_since, self._collectives = now, None
            return
        self._failure_store.request_status(f"no progress for {waited_s:.0f} s")

    def request_finding(self, why: str) -> int:
        """Request a report whose result is also delivered to this rank; return its number for `wait_for_finding`."""
        number = self._failure_store.request_status(why)
        self._requested.add(number)
        return number

    def wait_for_finding(self, number: int, *, wait_s: float) -> StallFinding | None:
        """Return the result of a requested report; None if it does not arrive in time. Runs on the main thread."""
        ends = time.monotonic() + wait_s
        with self._has_finding:
            while number not in self._findings and time.monotonic() < ends:
                self._has_finding.wait(0.1)
            self._requested.discard(number)
            return self._findings.get(number)

    def answer(self, number: int, why: str, status: RankStatus, now: float) -> None:
        """Write this rank's status."""
        self._failure_store.write_status(number, status)
        self._request = _StatusRequest(number, why, now)
        self._patience *= 2

    def advance(self, neighbors: Iterable[Peer], now: float) -> None:
        """Examine neighbors that do not answer; then, on the lowest rank that answered, print the report."""
        self._look_for_findings()  # also while a later request is open
        request = self._request
        if request is None:
            return
        is_complete = self._failure_store.count_statuses(request.number) >= self._size
        if not is_complete and not request.has_looked and now >= request.since + _NEIGHBOUR_S:
            request.has_looked = True
            self._look_at_silent(neighbors, request)
        for peer, begin in request.looking.items():
            stack = peer.read_stack(begin)
            if stack or now >= request.since + _NEIGHBOUR_S + _STACK_S:
                self._write_status_for(request.number, peer, stack)
                request.looking = {p: b for p, b in request.looking.items() if p is not peer}
                break
        if not is_complete and now < request.since + ANSWER_S:
            return
        self._request = None
        self._finish(request)

    def _finish(self, request: _StatusRequest) -> None:
        """Print the report on the lowest rank that answered, and publish its result for those that requested it."""
        if self._failure_store.reporter(request.number) != self._rank:
            return
        statuses = self._failure_store.statuses(request.number)
        report = StallReport([statuses.get(rank) or self._silent(rank) for rank in range(self._size)])
        self._failure_store.write_report(request.number, StallFinding(report.summary(), report.culprit).to_json())
        self.report = report.text(request.why)
        sys.stderr.write(f"\n{self.report}\n")
        sys.stderr.flush()

    def _look_for_findings(self) -> None:
        for number in list(self._requested):
            text = self._failure_store.report(number)
            if text is not None:
                with self._has_finding:
                    self._requested.discard(number)
                    self._findings[number] = StallFinding.from_json(text)
                    self._has_finding.notify_all()

    def _look_at_silent(self, neighbors: Iterable[Peer], request: _StatusRequest) -> None:
        """Make neighbors that cannot answer write their stacks; one rank per machine does so."""
        neighbors = [peer for peer in neighbors if not self._failure_store.is_done(peer.rank)]
        silent = [peer for peer in neighbors if not self._failure_store.has_status(request.number, peer.rank)]
        quiet = {peer.rank for peer in silent}
        if any(peer.rank < self._rank and peer.rank not in quiet for peer in neighbors):
            return
        request.looking = {peer: peer.ask_for_stack() for peer in silent}

    def _write_status_for(self, number: int, peer: Peer, stack: list[str]) -> None:
        what = {
            "T": "is stopped (SIGSTOP, or a debugger)",
            "D": "waits for a disk or a device",
            "R": "computes in C code that blocks Python",
            "gone": "has ended",
        }.get(peer.state(), "is in C code that blocks Python")
        where = f", at {stack[-1].strip()}" if stack else ""
        place = self._failure_store.place_of(peer.rank)
        status = RankStatus(peer.rank, peer.host, peer.pid, place, f"{what}{where}", tuple(stack), is_silent=True)
        self._failure_store.write_status_for(number, status)

    def _silent(self, rank: int) -> RankStatus:
        peer = self._failure_store.peer(rank)
        host, pid = (peer.host, peer.pid) if peer is not None else ("?", 0)
        return RankStatus(rank, host, pid, self._failure_store.place_of(rank), "does not answer", is_silent=True)


class _StatusRequest:
    """An open status request: its number, its reason, and when this rank answered."""

    __slots__ = ("has_looked", "looking", "number", "since", "why")

    def __init__(self, number: int, why: str, since: float) -> None:
        self.number = number
        self.why = why
        self.since = since
        self.has_looked = False
        self.looking: dict[Peer, int] = {}
