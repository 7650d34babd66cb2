"""`Watch`: observes the other ranks from a thread, so that no rank waits forever for one that is gone.

A strategy that communicates waits in C++ for its peers. If a peer raised, was killed, or hangs in its data loader, that
wait lasts until the process group's time-out, whose error then names the wrong rank. Each rank's watch reads the store
several times per second (store keys: failure_store.py). The hot path pays nothing.

Which rank failed
    A rank that raises publishes its exception with place and traceback before its teardown begins. A process that ends
    without a report is detected by its neighbors on the same machine (its pid is gone or a zombie; a launcher that
    started it knows the exit code), a lost host by its heartbeats. The first stored failure wins on all ranks:
    compare_set. A rank that ended normally has published so before and is not a failure.

What the other ranks do
    Their main thread usually gets an error of gloo or NCCL, caused by the failure of the other rank. `explain` waits
    for that failure and returns a RankFailure. A main thread that does not return from C++, or does something else, has
    three seconds to raise by itself; then the watch prints the failure and ends the process.

What is not a failure
    An exception that all ranks raise (a NonFiniteError, say, that the program catches to try other settings). A rank
    with its own error continues in its main thread. Runs are counted: a failure belongs to the n-th run of this
    program, and is settled when a rank with its own error leaves that run.

When nothing moves
    A rank without progress for `stall_timeout` requests the status of all ranks (stall_report.py). The report ends
    nothing: the process group's time-out does that, and `explain` then names the ranks that are missing.

Only the thread accesses the store. The main thread queues what is to be written and waits for a bounded time.
"""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import multiprocessing.util
import os
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from types import TracebackType
from typing import Any, TypeVar

from torch.distributed.distributed_c10d import PrefixStore

from ...errors import RankFailure, StopBySignal
from ..child_signals import note_dead_worker, without_child_signals
from ..failure import Failure
from .crash_file import crash_text, describe_crash, open_crash_file, read_crash
from .errors import is_communication_error, is_timeout
from .failure_store import FailureRecord, FailureStore
from .local_ranks import LocalRanks, ProcessStarter
from .peers import Peer, StackOnSignal
from .rank_status import RankStatus, count_collectives, last_collective
from .remote_ranks import RemoteRanks
from .signal_wakeup import SignalCounter, SignalWakeup
from .stall_report import ANSWER_S, StallFinding, StallReporter
from .stop_coordinator import StopCoordinator

T = TypeVar("T")

logger = logging.getLogger(__name__)

_TICK_S = 0.25
_MOST_POLLS = 8192  # per second, of all ranks together: one process hosts the store
_FAST_S = 0.02
_SECOND_S = 1.0
_GRACE_S = 3.0  # for a main thread to raise by itself after another rank's failure
_SLOW_S = 6.0  # for another rank to find out which rank is missing
_UNWIND_S = 60.0  # for a main thread that was notified to leave the run
_UNKNOWN_RANK = -1
_MOST_NAMED = 16
_LINGER_S = 1.5  # for the others to read a failure from a store that ends with this process


class Watch:
    """Observes the other ranks. One per process; a second one on the same store needs another `session`.

    Args:
        store: The store of all ranks; the watch opens its own connection.
        rank: Global rank of this process.
        size: Number of ranks.
        local_rank: Rank on this host.
        timeout: Time-out of the process group's collectives, as seconds or a timedelta.
        stall_timeout: Time without progress after which all ranks report their status. None: 300 s, or `timeout` if
            that is shorter.
        launcher: The launcher that started this machine's processes from this one and knows their exit codes; None
            without one.
        session: Distinguishes several watches on one store; the same on all ranks.

    Attributes:
        stop_coordinator: Agrees with the other ranks on where to stop.
        describe: Returns the rank's position as plain values (hook, stage, epoch, step, batch); {} outside of a run.
            Called from the thread at any time.
        run_signals: The signal handlers of the run, whose `requested` signal the thread forwards; None outside of a
            run.
        stall_timeout_s: Seconds without progress after which all ranks report their status.
    """

    def __init__(
        self,
        store: Any,  # Any: torch's type declares no clone()
        *,
        rank: int,
        size: int,
        local_rank: int = 0,
        timeout: float | timedelta = 1800.0,
        stall_timeout: float | timedelta | None = None,
        launcher: ProcessStarter | None = None,
        session: int | str = 0,
    ) -> None:
        self.describe: Callable[[], dict[str, object]] | None = None
        self.run_signals: SignalCounter | None = None
        self._signal_wakeup = SignalWakeup()
        self._rank = rank
        self._size = size
        self._local_rank = local_rank
        self._timeout_s = _seconds(timeout)
        self.stall_timeout_s = min(300.0, self._timeout_s) if stall_timeout is None else _seconds(stall_timeout)
        self._launcher = launcher
        self._pid = os.getpid()
        self._main = threading.get_ident()
        self._shared = store.clone()
        own = PrefixStore(f"loopwright/watch/{session}", self._shared)
        self._failure_store = FailureStore(own, rank=rank, size=size)
        self._wake = threading.Event()
        self.stop_coordinator = StopCoordinator(
            PrefixStore("stop", own), rank=rank, size=size, wake=self._wake.set, timeout_s=self._timeout_s
        )
        self.stop_coordinator.notify = self._failure_store.notify
        self._thread: threading.Thread | None = None
        self._is_stopping = False
        self._at_end: multiprocessing.util.Finalize | None = None
        self._earlier_hook = sys.excepthook
        self._exit: Callable[[int], object] = os._exit
        self._todo: deque[Callable[[], None]] = deque()
        self._lock = threading.Lock()
        # Shared by both threads, under the lock.
        self._record: FailureRecord | None = None
        self._learned_at = 0.0
        self._is_known = threading.Event()
        self._has_learned = threading.Event()
        self._notified_of: str | None = (
            None  # of what the main thread was notified: None, its "own" error, or an "other" rank's failure
        )
        self._notified_at = 0.0
        self._run = 0
        self._settled = 0
        self._is_in_run = False
        self._last_error: BaseException | None = None
        self._has_reported_crash = False  # that of a loader worker
        self._late: BaseException | None = None  # a time-out that the main thread tries to explain
        self._is_explaining = False
        # The thread's own.
        self._me: Peer | None = None
        self._local_ranks = LocalRanks(launcher)
        self._next_second = 0.0
        self._beat = 0
        self._place: dict[str, object] = {}
        self._remote_ranks = RemoteRanks(self._failure_store, rank=rank, size=size)
        self._rank_zero_is_done = False
        self._may_have_status_request = False
        self._seen_end = False
        self._stall_reporter = StallReporter(self._failure_store, rank=rank, size=size)

    @property
    def signal_pipe(self) -> int | None:
        """File descriptor for `signal.set_wakeup_fd`, which receives signals also while the main thread is in C++.

        None before `start`."""
        return self._signal_wakeup.pipe

    @property
    def last_stall_report(self) -> str:
        """Text of the last stall report that this rank printed."""
        return self._stall_reporter.report

    # --- the main thread: beginning and end --------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread. From now on uncaught exceptions of this process are published."""
        if self._size == 1 or self._thread is not None:
            return
        self._main = threading.get_ident()
        self._signal_wakeup.open()
        self._earlier_hook, sys.excepthook = sys.excepthook, self._on_uncaught
        self._is_known.clear()
        self._thread = threading.Thread(target=self._watch, name="loopwright-watch", daemon=True)
        self._thread.start()
        # A rank that died before it was published could not be named by its neighbors.
        self._is_known.wait(_GRACE_S)
        atexit.register(self.stop)
        # Processes that multiprocessing starts do not run atexit at their end, but these.
        self._at_end = multiprocessing.util.Finalize(None, self.stop, exitpriority=10)

    def stop(self) -> None:
        """Stop the thread and notify the other ranks that this one is done. Takes a moment on rank 0."""
        thread = self._thread
        if thread is None or os.getpid() != self._pid:
            return
        # Bound methods are created each time they are read: == and not `is`.
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
            self._signal_wakeup.close()

    def begin_run(self) -> None:
        """Begin the next run; called on every rank. Failures of earlier runs in which this rank failed too are settled.

        Raises:
            RankFailure: Another rank failed before; this one continued, but cannot communicate any more.
        """
        with self._lock:
            record = self._record
            if record is not None and self._notified_of == "other":
                raise record.failure.to_error()
            self._run += 1
            self._is_in_run = True
        self.stop_coordinator.reset()

    def end_run(self) -> None:
        """End the run, with or without an error; the user's program decides what follows."""
        with self._lock:
            self._is_in_run = False
            if self._notified_of != "own":
                return
            # This rank has its own error: failures of other ranks in the same run are settled with it.
            self._settled = self._run
            self._notified_of = self._last_error = self._late = None
            self._is_explaining = False
            if self._record is not None and self._record.run <= self._settled:
                self._record = None
                self._has_learned.clear()
        self.stop_coordinator.revive()

    # --- the main thread: failures -----------------------------------------------------------------------------------

    def explain_or_report(self, error: BaseException) -> RankFailure | None:
        """Return the failure of another rank that caused this error; without one, report the error as this rank's own.

        Args:
            error: The caught error. A loader worker that has died in the meantime is added to its notes.

        Returns:
            The error to raise instead, None if the error is this rank's own.
        """
        if self._thread is None or os.getpid() != self._pid:
            return None
        with without_child_signals(error):
            explained = None if note_dead_worker(error) else self.explain(error)
            if explained is None:
                note_dead_worker(error)
                self.report(error)
        return explained

    def report(self, error: BaseException) -> None:
        """Notify all ranks that this one failed, before teardown. The first failure of all ranks wins.

        Coordinated stops, and errors caused by another rank's failure, are not failures and are not published.
        """
        if self._thread is None or os.getpid() != self._pid:
            return
        if isinstance(error, StopBySignal | KeyboardInterrupt) and self.stop_coordinator.has_stopped:
            return
        with self._lock:
            if error is self._last_error:
                return
            self._last_error = error
            if isinstance(error, RankFailure):
                self._note_notified("other")
                return
            self._note_notified("own")
            run = max(self._run, self._settled + 1)
        failure = Failure.of(error, rank=self._rank, place=self._where())
        crashed = self._crash_of_worker()
        if crashed:
            failure = replace(failure, trace=f"{failure.trace.rstrip()}\n{crashed}")
            error.add_note(crashed)
        failure = replace(failure, exit_code=_exit_code(error))
        self._run_on_thread(lambda: self._post(failure, run), wait_s=2.0)

    def _crash_of_worker(self) -> str:
        """Return the stack of a crashed child process of this rank, such as a loader worker; "" without one."""
        me = self._me
        text = crash_text(me.crash_file) if me is not None else ""
        if not text or self._has_reported_crash:
            return ""
        self._has_reported_crash = True
        how, stack = describe_crash(text, self._main)
        return f"A process of rank {self._rank}, such as a loader worker, crashed: {how}\n{stack}"

    def first_failure(self, wait_s: float = 0.0) -> Failure | None:
        """Return the first failure of all ranks, waiting up to `wait_s` for one; None without one."""
        self._has_learned.wait(wait_s)
        record = self._record
        return record.failure if record is not None else None

    def explain(self, error: BaseException) -> RankFailure | None:
        """Return the failure of another rank that caused this error.

        Runs on the main thread; waits a few seconds at most.

        Args:
            error: The caught error; only communication errors are examined.

        Returns:
            The error to raise instead. None if the error is this rank's own: then call `report`.
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
        explained = self._explain_normal_end() if failure is None else None
        if failure is None and explained is None and self._late is None:
            # Another rank whose operation timed out may still be looking for the missing rank.
            failure = self.first_failure(_SLOW_S)
        if self._notified_of == "own":
            return None
        if failure is not None:
            explained = failure.to_error()
        if explained is not None:
            with self._lock:
                self._last_error = explained
                self._note_notified("other")
        return explained

    def places(self, ranks: Sequence[int]) -> dict[int, dict[str, object]]:
        """Return the positions of other ranks, about a second old; runs on the main thread."""
        return self._of_others(ranks, lambda rank: self._failure_store.place_of(rank))

    def ahead(self, ranks: Sequence[int]) -> list[int]:
        """Return those ranks that a second ago had called more collectives over all ranks than this one, or ended.

        Runs on the main thread, outside of a collective: such a rank will not come to where this one is.
        """
        own = count_collectives()
        found = self._of_others(
            ranks, lambda rank: self._failure_store.collectives_of(rank) > own or self._failure_store.is_done(rank)
        )
        return [rank for rank, is_ahead in found.items() if is_ahead]

    def _of_others(self, ranks: Sequence[int], ask: Callable[[int], T]) -> dict[int, T]:
        found: dict[int, T] = {}

        def look() -> None:
            found.update({rank: ask(rank) for rank in ranks})

        self._run_on_thread(look, wait_s=_SECOND_S)
        return found

    def _blame_the_missing(self) -> Failure | None:
        """Request a stall report after a time-out, and store the first missing rank as the failure."""
        finding = self._request_stall_report(
            f"the process group of rank {self._rank} timed out after {self._timeout_s:g} s"
        )
        failure = self.first_failure(0.0)
        if failure is not None or finding is None or finding.culprit is None:
            return failure
        culprit = finding.culprit
        if culprit.has_ended:
            return None  # that is not its own failure
        failure = Failure(
            rank=culprit.rank,
            host=culprit.host,
            pid=culprit.pid,
            how=f"{finding.summary}, until the process group's time-out of {self._timeout_s:g} s; "
            f"rank {culprit.rank} {culprit.doing}",
            place=dict(culprit.place),
            trace="".join(line if line.endswith("\n") else line + "\n" for line in culprit.stack),
            when=time.time(),
        )
        run = max(self._run, self._settled + 1)
        self._run_on_thread(lambda: self._post(failure, run), wait_s=2.0)
        return self.first_failure(0.0) or failure

    def _explain_normal_end(self) -> RankFailure | None:
        """Return an error that names ranks that ended normally while this one still communicates with them."""
        ended: list[int] = []

        def look() -> None:
            ended.extend(self._failure_store.ended_ranks(_MOST_NAMED))

        self._run_on_thread(look, wait_s=2.0)
        if not ended:
            return None
        names = ", ".join(map(str, sorted(ended)))
        one = len(ended) == 1
        return RankFailure(
            f"rank{'' if one else 's'} {names} ended normally, while rank {self._rank} still communicates with "
            f"{'it' if one else 'them'}: the ranks did not run the same code.",
            fix="look for a collective (barrier, all_reduce, save, fit) that only some ranks call, or a rank that "
            "leaves a loop early.",
        )

    def _request_stall_report(self, why: str) -> StallFinding | None:
        """Return which ranks wait for which; None if the thread cannot find out."""
        requested: list[int] = []

        def request() -> None:
            requested.append(self._stall_reporter.request_finding(why))

        self._run_on_thread(request, wait_s=2.0)
        return self._stall_reporter.wait_for_finding(requested[0], wait_s=2 * ANSWER_S) if requested else None

    def _note_notified(self, what: str) -> None:
        """Record of what the main thread was notified. The lock is held."""
        if self._notified_of is None:
            self._notified_of, self._notified_at = what, time.monotonic()

    def _run_on_thread(self, what: Callable[[], None], *, wait_s: float) -> None:
        """Run a function on the watch's thread and wait for it, at most `wait_s`."""
        is_done = threading.Event()

        def do() -> None:
            what()
            is_done.set()

        self._todo.append(do)
        self._wake.set()
        is_done.wait(wait_s)

    def _on_uncaught(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Publish an uncaught exception that no run has published; installed as `sys.excepthook`."""
        explained = None
        if os.getpid() == self._pid and error is not self._last_error:
            explained = self.explain_or_report(error)
        self._earlier_hook(kind, error, trace)
        if explained is not None:
            self._earlier_hook(type(explained), explained, None)

    def _where(self) -> dict[str, object]:
        """Return this rank's position, from the trainer."""
        if self.describe is None:
            return {}
        try:
            return dict(self.describe())
        # It reads attributes of a trainer that runs in another thread: one may be missing for a moment.
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
                self._wake.wait(max(_FAST_S if is_busy else _TICK_S, self._size / _MOST_POLLS))
                self._wake.clear()
            self._end()
        except RuntimeError as error:  # what a store raises whose server is gone
            self._without_store(error)

    def _introduce(self) -> None:
        stack = StackOnSignal()
        me = Peer.of_this_process(
            self._rank, self._local_rank, trace_signal=stack.number, trace_file=stack.file, thread=self._main
        )
        self._me = replace(me, crash_file=open_crash_file())
        self._failure_store.beat(0, {}, 0)
        self._failure_store.introduce(self._me)

    def _tick(self) -> bool:
        """Do the work that is due, and return whether the next call should come soon."""
        now = time.monotonic()
        while self._todo:
            self._todo.popleft()()
        if self._signal_wakeup.forward(self.run_signals, self.stop_coordinator, now) and self._notified_of is None:
            self._interrupt()
        was_notified = self._failure_store.was_notified()
        if was_notified or self.stop_coordinator.needs_poll:
            self.stop_coordinator.poll()
        if was_notified:
            for record in self._failure_store.new_failures():
                self._learn(record)
            self._may_have_status_request = True
            self._note_end_of_rank_zero()
        if self._may_have_status_request and not self._stall_reporter.is_open:
            # One after the other: two may have come with one notification, and each gets its report.
            request = self._failure_store.new_status_request()
            self._may_have_status_request = request is not None
            if request is not None:
                self._answer(*request, now=now)
        self._look_at_neighbors(now)
        if now >= self._next_second:
            self._next_second = now + _SECOND_S
            self._each_second(now)
        self._stall_reporter.advance(self._local_ranks.peers(), now)
        self._look_at_deadline(now)
        return self.stop_coordinator.is_under_way or self._stall_reporter.is_open or bool(self._todo)

    def _each_second(self, now: float) -> None:
        self._place = self._where()
        self._beat += 1
        self._failure_store.beat(self._beat, self._place, count_collectives())
        self._local_ranks.add(self._failure_store.new_neighbors())
        silent = self._remote_ranks.find_silent(self._me, now, after_s=self.stall_timeout_s)
        if silent is not None and self._record is None and not self._failure_store.is_done(silent.rank):
            self._post_for(silent, f"host {silent.host} has not answered for {self.stall_timeout_s:.0f} s")
        self._look_for_progress(now)

    def _interrupt(self) -> None:
        """End this process, which received Ctrl-C twice and does not return from C++."""
        me = self._me
        assert me is not None
        status = RankStatus.of_this_process(self._rank, host=me.host, pid=me.pid, thread=self._main, place={})
        how = f"KeyboardInterrupt: Ctrl-C was pressed twice, and this rank {status.doing}"
        place, trace = self._where(), "".join(status.stack)
        failure = Failure(self._rank, me.host, me.pid, how, place, trace, time.time(), exit_code=130)
        self._post(failure, max(self._run, self._settled + 1))
        self._die(failure)

    # --- the thread: failures ----------------------------------------------------------------------------------------

    def _post(self, failure: Failure, run: int) -> None:
        """Store a failure, unless another came first."""
        record = self._failure_store.write_failure(FailureRecord(run, self._rank, failure))
        # For readers without a watch: a launcher, and ranks that still wait for all to connect.
        self._shared.compare_set("failure", "", record.failure.to_json())
        self._learn(record)

    def _learn(self, record: FailureRecord) -> None:
        """Record the first failure that is not settled."""
        with self._lock:
            if record.run <= self._settled or self._record is not None:
                return
            self._record, self._learned_at = record, time.monotonic()
            self._has_learned.set()
            is_own = self._notified_of == "own"
        self._failure_store.note_seen("failure")
        if not is_own:
            self.stop_coordinator.fail(record.failure.to_error())

    def _look_at_neighbors(self, now: float) -> None:
        """Detect processes of this machine that have ended."""
        if self._local_ranks.note_ended(now):
            # Their last messages may not have been read yet.
            for record in self._failure_store.new_failures():
                self._learn(record)
        for peer, how, trace in self._local_ranks.lost(now, self._is_settled):
            self._post_for(peer, f"{how}, before the run was over", trace)

    def _is_settled(self, peer: Peer) -> bool:
        return self._record is not None or self._failure_store.is_done(peer.rank)

    def _post_for(self, peer: Peer, how: str, trace: str = "") -> None:
        """Store the failure of a rank that cannot do so any more."""
        place = self._failure_store.place_of(peer.rank)
        known = ", ".join(f"{name} {value}" for name, value in place.items() if value not in (None, ""))
        if known:  # up to a second old
            how += f" (about {known})"
        failure = Failure(peer.rank, peer.host, peer.pid, how, trace=trace, when=time.time())
        self._post(failure, max(self._run, self._settled + 1))

    def _look_at_deadline(self, now: float) -> None:
        """End the process if its main thread does not react to another rank's failure."""
        with self._lock:
            record, notified_of, is_in_run = self._record, self._notified_of, self._is_in_run
            if record is None or notified_of == "own" or (record.by == record.failure.rank == self._rank):
                return
            if notified_of is None:
                # Python code gets the failure from the stop coordinator, C++ code an error: both take a moment.
                is_late = now > self._learned_at + _GRACE_S
            else:
                is_late = is_in_run and now > self._notified_at + _UNWIND_S
        if is_late:
            self._die(record.failure)

    def _die(self, failure: Failure) -> None:
        """Print the reason, and end this process without its main thread, which may never return from C++."""
        text = f"\nLoopwright: rank {self._rank} ends because {failure.describe()}\n"
        prints_it = failure.trace.startswith("Traceback") and failure.host == socket.gethostname()
        if failure.trace and not prints_it:
            text += f"--- traceback of rank {failure.rank} ---\n{failure.trace.rstrip()}\n"
        # Not through sys.stderr, whose lock the main thread may hold.
        os.write(2, text.encode(errors="replace"))
        self._linger("failure", self._size)
        for child in multiprocessing.active_children():  # loader workers: nothing else ends them
            child.kill()
        if self._launcher is not None:
            self._launcher.kill(signal.SIGTERM)
        flush = threading.Thread(target=_flush, daemon=True)
        flush.start()
        flush.join(0.5)
        self._exit(failure.exit_code or 1)

    def _linger(self, what: str, count: int) -> None:
        """Wait a moment on rank 0, whose process may host the store, until the others have read something."""
        if self._rank != 0:
            return
        ends = time.monotonic() + _LINGER_S
        try:
            while time.monotonic() < ends and self._failure_store.count_seen(what) < count - self._local_ranks.num_gone:
                self._local_ranks.note_ended(time.monotonic())
                time.sleep(_FAST_S)
        except RuntimeError:
            logger.debug("the store is gone")

    # --- the thread: the end -----------------------------------------------------------------------------------------

    def _end(self) -> None:
        """Notify the others that this rank is done."""
        while self._todo:
            self._todo.popleft()()
        self.stop_coordinator.close()
        for record in self._failure_store.new_failures():
            self._learn(record)
        if self._record is not None:
            self._linger("failure", self._size)
            return
        host, doing = socket.gethostname(), "has ended normally"
        self._failure_store.write_done(
            RankStatus(self._rank, host, self._pid, doing=doing, collective=last_collective(), has_ended=True)
        )
        self._note_end_of_rank_zero()
        self._linger("end", self._size - 1)

    def _note_end_of_rank_zero(self) -> None:
        """Record that the store may close from now on, which is not a failure any more."""
        if self._rank == 0 or self._seen_end:
            return
        self._rank_zero_is_done = self._rank_zero_is_done or self._failure_store.is_done(0)
        if self._rank_zero_is_done or self._is_stopping:
            self._seen_end = True
            self._failure_store.note_seen("end")

    def _without_store(self, error: RuntimeError) -> None:
        """Continue without a store: its host is gone, which is a failure unless rank 0 was done."""
        if self._is_stopping or (self._record is None and self._rank_zero_is_done):
            return
        if self._record is None:
            self._learn_alone(error)
        while not self._is_stopping:
            self._look_at_deadline(time.monotonic())
            self._wake.wait(_TICK_S)
            self._wake.clear()

    def _learn_alone(self, error: RuntimeError) -> None:
        peer = self._local_ranks.peer(0) or self._remote_ranks.peer(0)
        host, pid = (peer.host, peer.pid) if peer is not None else ("?", 0)
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        how = f"it, or the process that launched it, ended or cannot be reached: the store does not answer ({first})"
        crash, trace = read_crash(peer.crash_file, peer.thread) if peer is not None else ("", "")
        failure = Failure(0, host, pid, crash or how, trace=trace, when=time.time())
        record = FailureRecord(max(self._run, self._settled + 1), _UNKNOWN_RANK, failure)
        with self._lock:
            self._record, self._learned_at = record, time.monotonic()
            self._has_learned.set()
            is_own = self._notified_of == "own"
        if not is_own:
            self.stop_coordinator.fail(record.failure.to_error())

    # --- the thread: rank statuses --------------------------------------------------------------------------

    def _look_for_progress(self, now: float) -> None:
        """Request a stall report when this rank has not moved within a run for too long."""
        progress = (
            self.stop_coordinator.position,
            tuple(sorted((key, str(value)) for key, value in self._place.items())),
        )
        if not self._place or self._record is not None or self._is_explaining:
            self._stall_reporter.moved(progress, now)
        else:
            self._stall_reporter.look_for_progress(progress, now, stall_timeout_s=self.stall_timeout_s)

    def _answer(self, number: int, why: str, *, now: float) -> None:
        me = self._me
        assert me is not None
        status = RankStatus.of_this_process(
            self._rank, host=me.host, pid=me.pid, thread=self._main, place=self._where(), late=self._late
        )  # fmt: skip
        self._stall_reporter.answer(number, why, status, now)


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
