"""Signals of a run: Ctrl-C and SIGTERM end it between two optimizer steps. Also adds the position in a run to errors.

Entered by the Trainer around each fit, validate, test and predict. The signal handlers only set a flag, which the loops
check at step boundaries. A second Ctrl-C interrupts immediately.

With several ranks, a signal can reach any of them at any time, but all must stop at the same step. Therefore the rank's
watch (fabric/watch/) reads the flag and passes it to the stop coordinator, which the loops check instead of the flag.
Signal handlers never communicate.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import signal
import sys
import threading
import time
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from ...console import ONLY_LOGS
from ...errors import StopBySignal
from ...tracebacks import end_in_silence

if TYPE_CHECKING:
    from ...fabric.watch import StopCoordinator, Watch

logger = logging.getLogger(__name__)

FAILED_SAVE = "failed save"  # the reason to stop if a rank could not write a checkpoint in the background


class RunSignals:
    """The signal handlers of one run. The earlier handlers are restored after it.

    Args:
        requeue: Another signal, with which the cluster requests that the job saves a checkpoint and is requeued; None
            if the cluster has no such signal.

    Attributes:
        requested: The signal that requested the end of the run; None without a request.
        requested_at_s: Time of the first request, in seconds of the monotonic clock.
        is_called: Whether a signal or a failed background save must be handled between two steps. Each step reads only
            this attribute.
        watch: Monitors the other ranks; None with one process.
        stop_coordinator: Chooses the stop step together with the other ranks; None with one process.
        num_handled: Number of signals that reached the Python handler. Signals wait while the main thread is in C++.
    """

    def __init__(self, requeue: signal.Signals | None = None) -> None:
        self._requeue = requeue
        self.requested: signal.Signals | None = None
        self.requested_at_s: float | None = None
        self.is_called = False
        self.watch: Watch | None = None
        self.stop_coordinator: StopCoordinator | None = None
        self.num_handled = 0
        self._has_pipe = False
        self._earlier: dict[signal.Signals, Any] = {}  # Any: what signal.signal returns

    def __enter__(self) -> RunSignals:
        if threading.current_thread() is threading.main_thread():
            numbers = (signal.SIGINT, signal.SIGTERM)
            for number in numbers if self._requeue is None else (*numbers, self._requeue):
                self.listen_to(number)
        return self

    def listen_to(self, number: signal.Signals) -> bool:
        """Make a signal end this run as SIGTERM does. Call it in the main thread, within this context.

        A handler of SIGTERM that was there is called first: a program that notes it wants the run to end as well.

        Returns:
            Whether the handler was set; False if the user has set a handler for another signal, which is kept.
        """
        handler = signal.getsignal(number)
        is_default = handler in (signal.SIG_DFL, signal.default_int_handler)
        is_joined = number is signal.SIGTERM and callable(handler) and not _is_of_a_run(handler)
        if number not in self._earlier and (is_default or is_joined):
            self._earlier[number] = signal.signal(number, self._on_signal)
        return number in self._earlier

    def request(self) -> None:
        """End the run as a signal does: between two steps, at the same step on all ranks. Thread-safe.

        If the cluster has a requeue signal, the job is requeued, as after that signal.
        """
        if self.requested is None:
            self.requested_at_s = time.monotonic()
            self.requested = self._requeue or signal.SIGTERM
            self.is_called = True

    def note_failed_save(self) -> None:
        """Make the main thread check the background save between two steps. Thread-safe."""
        self.is_called = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._disconnect()
        for number, earlier in self._earlier.items():
            signal.signal(number, earlier)
        self._earlier.clear()

    @property
    def handled(self) -> set[signal.Signals]:
        """The signals that end the run, without those that a handler of the user keeps."""
        return set(self._earlier)

    def connect(self, watch: Watch) -> None:
        """Use the watch's stop coordinator for this run. Call it on every rank, before the run's first phase.

        Raises:
            RankFailure: Another rank failed in an earlier run.
        """
        watch.begin_run()
        self.watch, self.stop_coordinator = watch, watch.stop_coordinator
        watch.run_signals = self
        if self._earlier and watch.signal_pipe is not None:
            self._has_pipe = _write_signals_to(watch.signal_pipe)

    def rejoin(self) -> None:
        """Use the stop coordinator again after a nested run has ended. Call it on every rank."""
        assert self.watch is not None
        self.watch.begin_run()
        self.watch.run_signals = self

    def _disconnect(self) -> None:
        watch, coordinator = self.watch, self.stop_coordinator
        if watch is None or coordinator is None:
            return
        if self._has_pipe:
            _write_signals_nowhere()
        watch.run_signals = watch.describe = None
        if self.requested is not None:
            # A signal after the last phase stops the next run of all ranks at its beginning.
            coordinator.request(self.requested.name)
        watch.end_run()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number)
        earlier = self._earlier.get(name)
        if name is signal.SIGTERM and callable(earlier):
            earlier(number, frame)
        self.num_handled += 1
        if self.requested is not None and name is signal.SIGINT:
            raise interrupt()
        if self.requested_at_s is None:
            self.requested_at_s = time.monotonic()
        # SIGTERM after Ctrl-C still means that the process must end.
        self.requested = name
        self.is_called = True

    def check(self) -> None:
        """End the run if a signal requested it. Called between two optimizer steps, with one process.

        Raises:
            KeyboardInterrupt: After Ctrl-C.
            StopBySignal: After SIGTERM; the exit code is 143.
        """
        self.is_called = False
        if self.requested is None:
            return
        logger.warning("%s: the run ends here, between two steps", self.requested.name, extra=ONLY_LOGS)
        if self.requested is signal.SIGINT:
            raise interrupt()
        raise StopBySignal

    def raise_late(self, verb: str) -> None:
        """End the program after a run whose last steps a signal followed, with one process.

        With several, the next run of all ranks stops at its beginning. A job that has trained is not requeued.

        Args:
            verb: The run, for the line that is logged.

        Raises:
            KeyboardInterrupt: After Ctrl-C.
            StopBySignal: After SIGTERM; the exit code is 143.
        """
        name = self.requested
        if name is None or name is self._requeue or self.stop_coordinator is not None:
            return
        logger.warning("%s arrived after the last step: %s is complete, the program ends here", name.name, verb)
        if name is not signal.SIGINT:
            raise StopBySignal
        error = interrupt()
        end_in_silence(error)
        raise error

    def stop(self) -> NoReturn:
        """End the run at the stop step of all ranks, after a signal at one of them.

        Raises:
            KeyboardInterrupt: After Ctrl-C.
            StopBySignal: After SIGTERM; the exit code is 143.
        """
        assert self.stop_coordinator is not None
        logger.warning(
            "%s: all ranks end the run here, between two steps", self.stop_coordinator.reason, extra=ONLY_LOGS
        )
        raise self.stop_error()

    @property
    def is_to_requeue(self) -> bool:
        """Whether the run ended because of the requeue signal, and not because of another signal."""
        if self._requeue is None:
            return False
        coordinator = self.stop_coordinator
        return self.requested is self._requeue if coordinator is None else coordinator.reason == self._requeue.name

    def stop_error(self) -> BaseException:
        """Return the error that ends the run on all ranks."""
        assert self.stop_coordinator is not None
        return interrupt() if self.stop_coordinator.reason == "SIGINT" else StopBySignal()


def interrupt() -> KeyboardInterrupt:
    """Return the error for Ctrl-C, and see to it that Python exits by SIGINT, so that a shell's loop ends as well.

    Python forgets that Ctrl-C ended the program if code at exit compiles a string. torch, where its compiler was loaded
    and tabulate is installed, imports tabulate at exit, which defines named tuples that way: so it is imported here.
    """
    if "torch._dynamo" in sys.modules:
        with contextlib.suppress(ImportError):
            importlib.import_module("tabulate")
    return KeyboardInterrupt()


def _is_of_a_run(handler: object) -> bool:
    """Return whether a handler is that of a run around this one, which ends after it."""
    return isinstance(getattr(handler, "__self__", None), RunSignals)


_has_fork_hook = False  # fork hooks cannot be removed; ours is registered when a run first needs it


def _write_signals_to(pipe: int) -> bool:
    """Make the interpreter write each signal's number to a pipe immediately, even while the main thread is in C++.

    Returns:
        Whether it was set. False if an event loop already uses the wakeup descriptor; then a hanging collective is not
        interrupted.
    """
    global _has_fork_hook
    earlier = signal.set_wakeup_fd(pipe, warn_on_full_buffer=False)
    if earlier != -1:
        signal.set_wakeup_fd(earlier)
        return False
    if not _has_fork_hook and hasattr(os, "register_at_fork"):
        # Ctrl-C in a terminal also reaches loader workers, and must not count as a second Ctrl-C of this process.
        os.register_at_fork(after_in_child=_write_signals_nowhere)
        _has_fork_hook = True
    return True


def _write_signals_nowhere() -> None:
    signal.set_wakeup_fd(-1)


def add_place(error: BaseException, place: str) -> None:
    """Add a note to an exception with its position in the run."""
    error.add_note(place)
