"""Asks all ranks where they stand, when nothing moves or a collective timed out, and makes a report of the answers.

All watches answer, also while their main threads hang; neighbours answer for those that cannot (a C function that holds
the interpreter's lock). The lowest rank that answered prints one report; whoever asked for it gets it, too.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterable
from typing import Any

from .failure_store import Board
from .peers import Peer
from .stall import Report, Standing, progress_of_collectives

__all__ = ["ANSWER_S", "Inquiry"]

ANSWER_S = 2.0  # for all ranks to say where they stand
_NEIGHBOUR_S = 1.0  # after which neighbours are looked at
_STACK_S = 0.5  # for a neighbour to write its stack


class Inquiry:
    """One rank's part in asking where everybody stands. Called by the watch's thread, but for `wait_for_report`.

    Args:
        board: What the ranks write for each other.
        rank: Global rank of this process.
        size: Number of ranks.

    Attributes:
        report: The text of the last report that this rank printed.
    """

    def __init__(self, board: Board, *, rank: int, size: int) -> None:
        self._board = board
        self._rank = rank
        self._size = size
        self.report = ""
        self._progress: Any = None  # Any: compared only
        self._progress_since = 0.0
        self._collectives: Any = None
        self._patience = 1
        self._question: _Question | None = None
        self._wanted: set[int] = set()
        self._reports: dict[int, Report] = {}
        self._has_report = threading.Condition()

    @property
    def is_open(self) -> bool:
        """Whether a question is being answered."""
        return self._question is not None

    def moved(self, progress: Any, now: float) -> None:  # Any: compared only
        """Note that this rank is where it should be: it made progress, or is in no run."""
        self._progress, self._progress_since = progress, now
        self._collectives, self._patience = None, 1

    def look_for_progress(self, progress: Any, now: float, *, stall_timeout_s: float) -> None:  # Any: compared only
        """Ask where everybody stands when this rank has been at the same place for long.

        Args:
            progress: Where this rank is.
            now: `time.monotonic()`.
            stall_timeout_s: How long is long; the next report on the same stall comes after twice the time.
        """
        if progress != self._progress:
            self.moved(progress, now)
            return
        waited_s, limit_s = now - self._progress_since, stall_timeout_s * self._patience
        if self._collectives is None and waited_s >= limit_s / 2:
            self._collectives = progress_of_collectives()
        if waited_s < limit_s:
            return
        if progress_of_collectives() != self._collectives:  # one long step, in which the ranks speak with each other
            self._progress_since, self._collectives = now, None
            return
        self._board.ask(f"no progress for {waited_s:.0f} s")

    def ask_for_report(self, why: str) -> int:
        """Ask all ranks, and have this one make a report, too; return its number for `wait_for_report`."""
        number = self._board.ask(why)
        self._wanted.add(number)
        return number

    def wait_for_report(self, number: int, *, wait_s: float) -> Report | None:
        """Return a report that was asked for; None if it does not come. Called by the main thread."""
        ends = time.monotonic() + wait_s
        with self._has_report:
            while number not in self._reports and time.monotonic() < ends:
                self._has_report.wait(0.1)
            return self._reports.get(number)

    def answer(self, number: int, why: str, standing: Standing, now: float) -> None:
        """Say where this rank stands."""
        self._board.answer(number, standing)
        self._question = _Question(number, why, now)
        self._patience *= 2

    def go_on(self, neighbours: Iterable[Peer], now: float) -> None:
        """Look at neighbours that do not answer; then, on the lowest rank that answered, print the report."""
        question = self._question
        if question is None:
            return
        is_complete = self._board.count_answers(question.number) >= self._size
        if not is_complete and not question.has_looked and now >= question.since + _NEIGHBOUR_S:
            question.has_looked = True
            self._look_at_silent(neighbours, question)
        for peer, begin in question.looking.items():
            stack = peer.read_stack(begin)
            if stack or now >= question.since + _NEIGHBOUR_S + _STACK_S:
                self._answer_for(question.number, peer, stack)
                question.looking = {p: b for p, b in question.looking.items() if p is not peer}
                break
        if not is_complete and now < question.since + ANSWER_S:
            return
        self._question = None
        self._finish(question)

    def _finish(self, question: _Question) -> None:
        answers = self._board.answers(question.number)
        lowest = min((rank for rank, standing in answers.items() if not standing.is_silent), default=-1)
        if lowest != self._rank and question.number not in self._wanted:
            return
        report = Report([answers.get(rank) or self._silent(rank) for rank in range(self._size)])
        if lowest == self._rank:
            self.report = report.text(question.why)
            sys.stderr.write(f"\n{self.report}\n")
            sys.stderr.flush()
        with self._has_report:
            self._reports[question.number] = report
            self._has_report.notify_all()

    def _look_at_silent(self, neighbours: Iterable[Peer], question: _Question) -> None:
        """Make neighbours that cannot answer write their stack; one rank per machine does so."""
        neighbours = list(neighbours)
        silent = [peer for peer in neighbours if not self._board.has_answered(question.number, peer.rank)]
        quiet = {peer.rank for peer in silent}
        if any(peer.rank < self._rank and peer.rank not in quiet for peer in neighbours):
            return
        question.looking = {peer: peer.ask_for_stack() for peer in silent}

    def _answer_for(self, number: int, peer: Peer, stack: list[str]) -> None:
        what = {
            "T": "is stopped (SIGSTOP, or a debugger)",
            "D": "waits for a disk or a device",
            "R": "computes in C code that does not let Python run",
            "gone": "has ended",
        }.get(peer.state(), "is in C code that does not let Python run")
        where = f", at {stack[-1].strip()}" if stack else ""
        place = self._board.place_of(peer.rank)
        standing = Standing(peer.rank, peer.host, peer.pid, place, f"{what}{where}", tuple(stack), is_silent=True)
        self._board.answer_for(number, standing)

    def _silent(self, rank: int) -> Standing:
        peer = self._board.peer(rank)
        host, pid = (peer.host, peer.pid) if peer is not None else ("?", 0)
        return Standing(rank, host, pid, self._board.place_of(rank), "does not answer", is_silent=True)


class _Question:
    """A question that is being answered: its number, why it was asked, and when this rank answered."""

    __slots__ = ("has_looked", "looking", "number", "since", "why")

    def __init__(self, number: int, why: str, since: float) -> None:
        self.number = number
        self.why = why
        self.since = since
        self.has_looked = False
        self.looking: dict[Peer, int] = {}
