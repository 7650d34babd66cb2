"""Watches the other ranks from a thread of its own, so that no rank waits for ever for one that is gone.

A strategy that communicates waits in C++ for its peers: for one that raised, was killed, or hangs in its data loader,
that is until the process group's time-out, and then it blames the wrong one. Each rank's watch looks at the store some
times per second (store keys: board.py). The hot path pays nothing.

Who is to blame
    A rank that raises posts its exception with place and traceback before anything of it is torn down. A process that
    ends without a word is noticed by its neighbours on the same machine (its pid is gone or a zombie; a launcher that
    started it knows the exit code), a host that is lost by its heartbeats. The first failure that is written down wins,
    on all ranks: compare_set. A rank that ended regularly has said so before and is no failure.

What the others do
    Their main thread mostly gets an error of gloo or NCCL, by the failure of the other. `explain` waits for the failure
    that is behind it and makes a RankFailure out of it. A main thread that does not come out of C++, or does something
    else, has a grace of three seconds to raise by itself; then the thread prints the failure and ends the process.

What is not a failure
    An exception that all ranks have alike (a NonFiniteError, say, that the program catches to try other settings). Each
    rank that has an error of its own is in the hands of its own main thread. Runs are counted: a failure belongs to the
    n-th run that this program began, and when a rank that had an error of its own leaves that run, it is settled.

When nothing moves
    Whoever sees no progress for `stall_timeout` asks all ranks where they stand (inquiry.py). Nothing is ended by the
    report: the process group's time-out does that, and `explain` then names the ranks that did not come.

Only the thread speaks with the store; the main thread hands it what it wants to say and waits for a bounded time.
"""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import multiprocessing.util
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from types import TracebackType
from typing import Any, Protocol

from ...errors import RankFailure, StopBySignal
from ..failure import Failure, describe_exit
from .crash_file import crash_text, describe_crash, open_crash_file, read_crash
from .errors import is_communication_error, is_timeout
from .failure_store import Board, Record
from .peers import Peer, StackOnSignal
from .remote_ranks import FarRanks
from .signal_wakeup import Guard, HeardSignals
from .stall import Report, Standing
from .stall_report import ANSWER_S, Inquiry
from .stop_coordinator import StopGate

__all__ = ["Watch"]

logger = logging.getLogger(__name__)

_TICK_S = 0.25
_FAST_S = 0.02
_SECOND_S = 1.0
_GRACE_S = 3.0  # for a main thread to raise by itself after another rank's failure
_SLOW_S = 6.0  # for another rank to find out who is missing
_UNWIND_S = 60.0  # for a main thread that was told to get out of the run
_BETTER_WORD_S = 0.5  # for somebody who knows the exit code, before "it ended without a word" is written down
_NOBODY = -1
_LINGER_S = 1.5  # for the others to read a failure from a store that ends with this process


class _Launcher(Protocol):
    def local_exits(self) -> dict[int, int]: ...

    def kill(self, signum: int) -> None: ...


class Watch:
    """One rank's watch over the others. One per process; a second one on the same store needs another `session`.

    Args:
        store: The store of all ranks; the watch makes a connection of its own.
        rank: Global rank of this process.
        size: Number of ranks.
        local_rank: Rank on this host.
        timeout: Of the process group: how long a collective may take. Seconds or a timedelta.
        stall_timeout: After so long without progress all ranks say where they stand. None: 300 s, or `timeout` if that
            is shorter.
        launcher: Started this machine's processes from this one, and knows their exit codes; None: nobody here did.
        session: Tells several watches on one store apart; the same on all ranks.

    Attributes:
        gate: Agrees with the other ranks on where to stop.
        describe: Returns where this rank is, as plain values (hook, stage, epoch, step, batch); {} outside of a run.
            Called from the thread at any time.
        guard: Whose `requested` signal the thread hands to the gate; None outside of a run.
        stall_timeout_s: After so many seconds without progress all ranks say where they stand.
    """

    def __init__(
        self,
        store: Any,  # Any: importing torch.distributed costs time that one process need not pay
        *,
        rank: int,
        size: int,
        local_rank: int = 0,
        timeout: float | timedelta = 1800.0,
        stall_timeout: float | timedelta | None = None,
        launcher: _Launcher | None = None,
        session: int | str = 0,
    ) -> None:
        from torch.distributed.distributed_c10d import PrefixStore

        self.describe: Callable[[], dict[str, Any]] | None = None
        self.guard: Guard | None = None
        self._signals = HeardSignals()
        self._rank = rank
        self._size = size
        self._local_rank = local_rank
        self._timeout_s = _seconds(timeout)
        self.stall_timeout_s = min(300.0, self._timeout_s) if stall_timeout is None else _seconds(stall_timeout)
        self._launcher = launcher
        self._pid = os.getpid()
        self._main = threading.get_ident()
        self._shared = store.clone()
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        own = PrefixStore(f"loopwright/watch/{attempt}/{session}", self._shared)
        self._board = Board(own, rank=rank, size=size)
        self._wake = threading.Event()
        self.gate = StopGate(
            PrefixStore("gate", own), rank=rank, size=size, wake=self._wake.set, timeout_s=self._timeout_s
        )
        self.gate.ring = self._board.ring
        self._thread: threading.Thread | None = None
        self._is_stopping = False
        self._at_end: multiprocessing.util.Finalize | None = None
        self._earlier_hook: Any = None  # Any: what sys.excepthook was
        self._exit: Callable[[int], Any] = os._exit
        self._todo: deque[Callable[[], None]] = deque()
        self._lock = threading.Lock()
        # Shared by both threads, under the lock.
        self._record: Record | None = None
        self._learned_at = 0.0
        self._is_known = threading.Event()
        self._has_learned = threading.Event()
        self._told: str | None = None  # what the main thread knows: None, "own" error, or "other" rank's failure
        self._told_at = 0.0
        self._run = 0
        self._settled = 0
        self._is_in_run = False
        self._last_error: BaseException | None = None
        self._has_told_crash = False  # that of a loader worker
        self._late: BaseException | None = None  # a time-out that the main thread tries to explain
        self._is_explaining = False
        # The thread's own.
        self._me: Peer | None = None
        self._neighbours: dict[int, Peer] = {}
        self._gone: dict[int, float] = {}
        self._next_second = 0.0
        self._beat = 0
        self._place: dict[str, Any] = {}
        self._far = FarRanks(self._board, rank=rank, size=size)
        self._rank_zero_is_done = False
        self._may_have_question = False
        self._seen_end = False
        self._inquiry = Inquiry(self._board, rank=rank, size=size)

    @property
    def signal_pipe(self) -> int | None:
        """For `signal.set_wakeup_fd`: signals show there while the main thread is in C++, too. None before `start`."""
        return self._signals.pipe

    @property
    def report_of_stall(self) -> str:
        """The text of the last report on where all ranks stand, on the ranks that made one."""
        return self._inquiry.report

    # --- the main thread: beginning and end --------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to watch. Uncaught exceptions of this process are posted from now on, too."""
        if self._size == 1 or self._thread is not None:
            return
        self._main = threading.get_ident()
        self._signals.open()
        self._earlier_hook, sys.excepthook = sys.excepthook, self._on_uncaught
        self._is_known.clear()
        self._thread = threading.Thread(target=self._watch, name="loopwright-watch", daemon=True)
        self._thread.start()
        # A rank that died before it had introduced itself could not be named by its neighbours.
        self._is_known.wait(_GRACE_S)
        atexit.register(self.stop)
        # Processes that multiprocessing starts do not run atexit at their end, but these.
        self._at_end = multiprocessing.util.Finalize(None, self.stop, exitpriority=10)

    def stop(self) -> None:
        """End the watch regularly: the other ranks are told that this one is done. Takes a moment on rank 0."""
        thread = self._thread
        if thread is None or os.getpid() != self._pid:
            return
        # Bound methods are made anew each time they are read: == and not `is`.
        if sys.excepthook == self._on_uncaught:
            sys.excepthook = self._earlier_hook
        atexit.unregister(self.stop)
        if self._at_end is not None:
            self._at_end.cancel()
        self._is_stopping = True
        self._wake.set()
        thread.join(_LINGER_S + _GRACE_S)
        self._thread = None
        if not thread.is_alive():
            self._signals.close()

    def begin_run(self) -> None:
        """Note that the next run begins; on every rank. Failures of earlier runs that this rank shared are settled.

        Raises:
            RankFailure: Another rank failed before; this one went on, but cannot communicate any more.
        """
        with self._lock:
            record = self._record
            if record is not None and self._told == "other":
                raise record.failure.to_error()
            self._run += 1
            self._is_in_run = True
        self.gate.reset()

    def end_run(self) -> None:
        """Note that the run is over, with or without an error; what happens next is up to the user's program."""
        with self._lock:
            self._is_in_run = False
            if self._told != "own":
                return
            # An error of this rank's own: whoever failed in the same run did so on their own account as well.
            self._settled = self._run
            self._told = self._last_error = self._late = None
            self._is_explaining = False
            if self._record is not None and self._record.run <= self._settled:
                self._record = None
                self._has_learned.clear()
        self.gate.revive()

    # --- the main thread: failures -----------------------------------------------------------------------------------

    def report(self, error: BaseException) -> None:
        """Tell all ranks that this one failed, before anything is torn down. The first failure of all ranks wins.

        Agreed stops are no failures, and neither is what follows from another rank's: they are left out here.
        """
        if self._thread is None or os.getpid() != self._pid:
            return
        if isinstance(error, StopBySignal | KeyboardInterrupt) and self.gate.has_stopped:
            return
        with self._lock:
            if error is self._last_error:
                return
            self._last_error = error
            if isinstance(error, RankFailure):
                self._tell("other")
                return
            self._tell("own")
            run = max(self._run, self._settled + 1)
        try:
            self._post_own(error, run)
        except RuntimeError as late:
            # torch raises it for a loader worker that died, from the handler of SIGCHLD: wherever this thread is.
            error.add_note(str(late))
            self._post_own(error, run)

    def _post_own(self, error: BaseException, run: int) -> None:
        failure = Failure.of(error, rank=self._rank, place=self._where())
        crashed = self._crash_of_worker()
        if crashed:
            failure = replace(failure, trace=f"{failure.trace.rstrip()}\n{crashed}")
            error.add_note(crashed)
        failure = replace(failure, exit_code=_exit_code(error))
        self._do(lambda: self._post(failure, run), wait_s=2.0)

    def _crash_of_worker(self) -> str:
        """Return the stack of a process of this rank that crashed, such as a loader worker; "" without one."""
        me = self._me
        text = crash_text(me.crash_file) if me is not None else ""
        if not text or self._has_told_crash:
            return ""
        self._has_told_crash = True
        how, stack = describe_crash(text, self._main)
        return f"A process of rank {self._rank}, such as a loader worker, crashed: {how}\n{stack}"

    def first_failure(self, wait_s: float = 0.0) -> Failure | None:
        """Return the first failure of all ranks, waiting for one at most so long; None if there is none."""
        self._has_learned.wait(wait_s)
        record = self._record
        return record.failure if record is not None else None

    def explain(self, error: BaseException) -> RankFailure | None:
        """Return the failure of another rank that this error only follows from.

        Called by the main thread with an error that it caught; waits a few seconds at most.

        Args:
            error: An error of any kind; only those of communication are asked about.

        Returns:
            What to raise instead. None: the error is this rank's own, and `report` is to be called.
        """
        if self._thread is None or os.getpid() != self._pid:
            return None
        if isinstance(error, RankFailure):
            return None  # explained already
        if not is_communication_error(error):
            return None
        self._late = error if is_timeout(error) else None
        self._is_explaining = True
        failure = self.first_failure(0.0)
        if failure is None:
            failure = self._blame_the_missing() if self._late is not None else self.first_failure(_GRACE_S)
        explained = self._someone_left() if failure is None else None
        if failure is None and explained is None and self._late is None:
            # Another rank whose operation timed out may still be finding out who is missing.
            failure = self.first_failure(_SLOW_S)
        if self._told == "own":
            return None
        if failure is not None:
            explained = failure.to_error()
        if explained is not None:
            with self._lock:
                self._last_error = explained
                self._tell("other")
        return explained

    def places(self) -> dict[int, dict[str, Any]]:
        """Return where the other ranks are, as they said within the last second or so; called by the main thread."""
        found: dict[int, dict[str, Any]] = {}

        def look() -> None:
            found.update({rank: self._board.place_of(rank) for rank in range(self._size) if rank != self._rank})

        self._do(look, wait_s=_SECOND_S)
        return found

    def _blame_the_missing(self) -> Failure | None:
        """Ask all ranks where they stand after a time-out, and write down the first that did not come."""
        report = self._ask_all(f"the process group of rank {self._rank} timed out after {self._timeout_s:g} s")
        failure = self.first_failure(0.0)
        if failure is not None or report is None or report.culprit is None:
            return failure
        culprit = report.culprit
        failure = Failure(
            rank=culprit.rank,
            host=culprit.host,
            pid=culprit.pid,
            how=f"{report.summary()}, until the process group's time-out of {self._timeout_s:g} s; "
            f"rank {culprit.rank} {culprit.doing}",
            place=dict(culprit.place),
            trace="".join(line if line.endswith("\n") else line + "\n" for line in culprit.stack),
            when=time.time(),
        )
        run = max(self._run, self._settled + 1)
        self._do(lambda: self._post(failure, run), wait_s=2.0)
        return self.first_failure(0.0) or failure

    def _someone_left(self) -> RankFailure | None:
        """Return an error that names the ranks that ended regularly, while this one still needed them."""
        ended: list[int] = []

        def look() -> None:
            ended.extend(rank for rank in range(self._size) if rank != self._rank and self._board.is_done(rank))

        self._do(look, wait_s=2.0)
        if not ended:
            return None
        names = ", ".join(map(str, ended))
        one = len(ended) == 1
        return RankFailure(
            f"rank{'' if one else 's'} {names} ended regularly, while rank {self._rank} still communicates with "
            f"{'it' if one else 'them'}: the ranks did not do the same.",
            fix="look for a collective (barrier, all_reduce, a save, a fit) that only some ranks call, or a rank that "
            "leaves a loop early.",
        )

    def _ask_all(self, why: str) -> Report | None:
        """Return where all ranks stand, as of now; None if the thread cannot find out."""
        asked: list[int] = []

        def ask() -> None:
            asked.append(self._inquiry.ask_for_report(why))

        self._do(ask, wait_s=2.0)
        return self._inquiry.wait_for_report(asked[0], wait_s=2 * ANSWER_S) if asked else None

    def _tell(self, what: str) -> None:
        """Note what the main thread knows. The lock is held."""
        if self._told is None:
            self._told, self._told_at = what, time.monotonic()

    def _do(self, what: Callable[[], None], *, wait_s: float) -> None:
        """Let the thread do something, and wait for it, but not for ever."""
        is_done = threading.Event()

        def do() -> None:
            what()
            is_done.set()

        self._todo.append(do)
        self._wake.set()
        is_done.wait(wait_s)

    def _on_uncaught(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Post an exception that ends this program, where no run did it: what `sys.excepthook` calls."""
        explained = None
        if os.getpid() == self._pid and error is not self._last_error:
            explained = self.explain(error)
            if explained is None:
                self.report(error)
        self._earlier_hook(kind, error, trace)
        if explained is not None:
            self._earlier_hook(type(explained), explained, None)

    def _where(self) -> dict[str, Any]:
        """Return where this rank is, as the trainer says."""
        if self.describe is None:
            return {}
        try:
            return dict(self.describe())
        # It reads attributes of a trainer that is at work in another thread: one may be missing for a moment.
        except (AttributeError, RuntimeError, KeyError, TypeError):
            return self._place

    # --- the thread --------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        try:
            try:
                self._introduce()
            finally:
                self._is_known.set()
            while not self._is_stopping:
                is_busy = self._tick()
                self._wake.wait(_FAST_S if is_busy else _TICK_S)
                self._wake.clear()
            self._end()
        except RuntimeError as error:  # what a store raises whose server is gone
            self._without_store(error)

    def _introduce(self) -> None:
        stack = StackOnSignal()
        me = Peer.of_this_process(
            self._rank,
            self._local_rank,
            trace_signal=stack.number,
            trace_file=stack.file,
            thread=self._main,
        )
        self._me = replace(me, crash_file=open_crash_file())
        self._board.beat(0, {})
        self._board.introduce(self._me)

    def _tick(self) -> bool:
        """Do what there is to do, and return whether to come back soon."""
        now = time.monotonic()
        while self._todo:
            self._todo.popleft()()
        if self._signals.hand_on(self.guard, self.gate, now) and self._told is None:
            self._interrupt()
        has_rung = self._board.has_rung()
        if has_rung or self.gate.needs_poll:
            self.gate.poll()
        if has_rung:
            for record in self._board.new_failures():
                self._learn(record)
            self._may_have_question = True
            self._note_end_of_rank_zero()
        if self._may_have_question and not self._inquiry.is_open:
            # One after the other: two may have come with one ring, and each gets its report.
            question = self._board.new_question()
            self._may_have_question = question is not None
            if question is not None:
                self._answer(*question, now=now)
        self._look_at_neighbours(now)
        if now >= self._next_second:
            self._next_second = now + _SECOND_S
            self._each_second(now)
        self._inquiry.go_on(self._neighbours.values(), now)
        self._look_at_deadline(now)
        return self.gate.is_under_way or self._inquiry.is_open or bool(self._todo)

    def _each_second(self, now: float) -> None:
        self._place = self._where()
        self._beat += 1
        self._board.beat(self._beat, self._place)
        for peer in self._board.new_neighbours():
            self._neighbours[peer.rank] = peer
        silent = self._far.find_silent(self._me, now, after_s=self.stall_timeout_s)
        if silent is not None and self._record is None and not self._board.is_done(silent.rank):
            self._post_for(silent, f"host {silent.host} has not answered for {self.stall_timeout_s:.0f} s")
        self._look_for_progress(now)

    def _interrupt(self) -> None:
        """End this process, which got Ctrl-C twice and does not come out of C++."""
        me = self._me
        assert me is not None
        standing = Standing.of_this_process(self._rank, host=me.host, pid=me.pid, thread=self._main, place={})
        how = f"KeyboardInterrupt: Ctrl-C came twice, and this rank {standing.doing}"
        place, trace = self._where(), "".join(standing.stack)
        failure = Failure(self._rank, me.host, me.pid, how, place, trace, time.time(), exit_code=130)
        self._post(failure, max(self._run, self._settled + 1))
        self._die(failure)

    # --- the thread: failures ----------------------------------------------------------------------------------------

    def _post(self, failure: Failure, run: int) -> None:
        """Write a failure down, unless another came first."""
        record = self._board.write_failure(Record(run, self._rank, failure))
        # For those who do not watch: a launcher, and ranks that still wait for all to be there.
        self._shared.compare_set("failure", "", record.failure.to_json())
        self._learn(record)

    def _learn(self, record: Record) -> None:
        """Take notice of the first failure that is not settled."""
        with self._lock:
            if record.run <= self._settled or self._record is not None:
                return
            self._record, self._learned_at = record, time.monotonic()
            self._has_learned.set()
            is_own = self._told == "own"
        self._board.note_seen("failure")
        if not is_own:
            self.gate.fail(record.failure.to_error())

    def _look_at_neighbours(self, now: float) -> None:
        """Notice processes of this machine that have ended."""
        for rank, peer in list(self._neighbours.items()):
            if rank in self._gone or peer.state() != "gone":
                continue
            self._gone[rank] = now
            # What it said last may not have been read yet.
            for record in self._board.new_failures():
                self._learn(record)
        for rank, since in list(self._gone.items()):
            ended = self._neighbours.get(rank)
            if ended is None:
                continue
            if self._record is not None or self._board.is_done(rank):
                del self._neighbours[rank]
                continue
            crash, trace = read_crash(ended.crash_file, ended.thread)
            how = self._exit_of(ended)
            if crash:
                how = crash if how is None else f"{how}: {crash}"
            if how is None and now < since + _BETTER_WORD_S:
                continue
            del self._neighbours[rank]
            how = how or "the process ended without a word (killed, out of memory, or os._exit)"
            self._post_for(ended, f"{how}, before the run was over", trace)

    def _exit_of(self, peer: Peer) -> str | None:
        if self._launcher is None:
            return None
        code = self._launcher.local_exits().get(peer.local_rank)
        return None if code is None else describe_exit(code)

    def _post_for(self, peer: Peer, how: str, trace: str = "") -> None:
        """Write down the failure of a rank that cannot do so any more."""
        place = self._board.place_of(peer.rank)
        known = ", ".join(f"{name} {value}" for name, value in place.items() if value not in (None, ""))
        if known:  # it said so up to a second before
            how += f" (about {known})"
        failure = Failure(peer.rank, peer.host, peer.pid, how, trace=trace, when=time.time())
        self._post(failure, max(self._run, self._settled + 1))

    def _look_at_deadline(self, now: float) -> None:
        """End the process whose main thread does not take notice of another rank's failure."""
        with self._lock:
            record, told, is_in_run = self._record, self._told, self._is_in_run
            if record is None or told == "own" or (record.by == record.failure.rank == self._rank):
                return
            if told is None:
                # Python code gets the failure from the gate, C++ code an error: both take a moment.
                is_late = now > self._learned_at + _GRACE_S
            else:
                is_late = is_in_run and now > self._told_at + _UNWIND_S
        if is_late:
            self._die(record.failure)

    def _die(self, failure: Failure) -> None:
        """Say why, and end this process without its main thread, which may never come back from C++."""
        text = f"\nLoopwright: rank {self._rank} ends, because {failure.describe()}\n"
        if failure.trace:
            text += f"--- traceback of rank {failure.rank} ---\n{failure.trace.rstrip()}\n"
        # Not through sys.stderr, whose lock the main thread may hold.
        os.write(2, text.encode(errors="replace"))
        self._linger("failure", self._size)
        for child in multiprocessing.active_children():  # loader workers: nobody else ends them
            child.kill()
        if self._launcher is not None:
            self._launcher.kill(signal.SIGTERM)
        flush = threading.Thread(target=_flush, daemon=True)
        flush.start()
        flush.join(0.5)
        self._exit(failure.exit_code or 1)

    def _linger(self, what: str, count: int) -> None:
        """Wait a moment for the others to read something, if the store may end with this process: on rank 0."""
        if self._rank != 0:
            return
        ends = time.monotonic() + _LINGER_S
        try:
            while time.monotonic() < ends and self._board.count_seen(what) < count - len(self._gone):
                self._look_at_gone()
                time.sleep(_FAST_S)
        except RuntimeError:
            logger.debug("the store is gone")

    def _look_at_gone(self) -> None:
        for rank, peer in self._neighbours.items():
            if rank not in self._gone and peer.state() == "gone":
                self._gone[rank] = time.monotonic()

    # --- the thread: the end -----------------------------------------------------------------------------------------

    def _end(self) -> None:
        """Tell the others that this rank is done."""
        while self._todo:
            self._todo.popleft()()
        self.gate.close()
        for record in self._board.new_failures():
            self._learn(record)
        if self._record is not None:
            self._linger("failure", self._size)
            return
        self._board.write_done()
        self._note_end_of_rank_zero()
        self._linger("end", self._size - 1)

    def _note_end_of_rank_zero(self) -> None:
        """Note that the store may go from now on, which is no failure any more."""
        if self._rank == 0 or self._seen_end:
            return
        self._rank_zero_is_done = self._rank_zero_is_done or self._board.is_done(0)
        if self._rank_zero_is_done or self._is_stopping:
            self._seen_end = True
            self._board.note_seen("end")

    def _without_store(self, error: RuntimeError) -> None:
        """Go on without a store: its host is gone, which is a failure unless rank 0 was done."""
        if self._is_stopping or (self._record is None and self._rank_zero_is_done):
            return
        if self._record is None:
            self._learn_alone(error)
        while not self._is_stopping:
            self._look_at_deadline(time.monotonic())
            self._wake.wait(_TICK_S)
            self._wake.clear()

    def _learn_alone(self, error: RuntimeError) -> None:
        peer = self._neighbours.get(0) or self._far.peer(0)
        host, pid = (peer.host, peer.pid) if peer is not None else ("?", 0)
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        how = f"it, or the process that launched it, ended or cannot be reached: the store does not answer ({first})"
        crash, trace = read_crash(peer.crash_file, peer.thread) if peer is not None else ("", "")
        failure = Failure(0, host, pid, crash or how, trace=trace, when=time.time())
        record = Record(max(self._run, self._settled + 1), _NOBODY, failure)
        with self._lock:
            self._record, self._learned_at = record, time.monotonic()
            self._has_learned.set()
            is_own = self._told == "own"
        if not is_own:
            self.gate.fail(record.failure.to_error())

    # --- the thread: where everybody stands --------------------------------------------------------------------------

    def _look_for_progress(self, now: float) -> None:
        """Ask where everybody stands when this rank has been at the same place of a run for long."""
        progress = (self.gate.position, tuple(sorted((key, str(value)) for key, value in self._place.items())))
        if not self._place or self._record is not None or self._is_explaining:
            self._inquiry.moved(progress, now)
        else:
            self._inquiry.look_for_progress(progress, now, stall_timeout_s=self.stall_timeout_s)

    def _answer(self, number: int, why: str, *, now: float) -> None:
        me = self._me
        assert me is not None
        standing = Standing.of_this_process(
            self._rank, host=me.host, pid=me.pid, thread=self._main, place=self._where(), late=self._late
        )  # fmt: skip
        self._inquiry.answer(number, why, standing, now)


def _seconds(value: float | timedelta) -> float:
    return value.total_seconds() if isinstance(value, timedelta) else float(value)


def _exit_code(error: BaseException) -> int:
    if isinstance(error, KeyboardInterrupt):
        return 130
    if isinstance(error, SystemExit) and isinstance(error.code, int) and error.code:
        return error.code
    return 1


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
