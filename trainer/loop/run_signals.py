"""Signals and errors of a run: Ctrl-C and SIGTERM end it between two optimizer steps, errors name their place.

Entered by the Trainer around each fit, validate, test and predict. The signal handlers only set a flag; the loops look
at it at step boundaries. A second Ctrl-C interrupts at once.

With several ranks a signal comes to any of them at any moment, and all have to stop at the same step: then the flag is
read by the rank's watch (fabric/watch/), which passes it to the stop coordinator, where the ranks agree; the loops ask
it instead of the flag. Still no handler communicates.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from ...errors import StopBySignal

if TYPE_CHECKING:
    from ...fabric.watch import StopCoordinator, Watch

__all__ = ["FAILED_SAVE", "RunSignals"]

logger = logging.getLogger(__name__)

FAILED_SAVE = "failed save"  # why all ranks stop, where one of them could not write a checkpoint in the background


class RunSignals:
    """Holds the signal handlers of one run and gives back the earlier ones after it.

    Args:
        requeue: A further signal, with which the cluster says that the job is to save itself and be put back into the
            queue; None for none.

    Attributes:
        requested: The signal that asked the run to end, None while there is none.
        requested_at_s: When it first did, in seconds of the monotonic clock.
        is_called: Whether there is anything to look at between two steps: a signal, or a save in the background that
            failed. The only thing that a step asks.
        watch: Looks after the other ranks; None with one process.
        stop_coordinator: Agrees with the other ranks on where to stop; None with one process.
        heard: How many signals the handler got to see: less than came, while the main thread is in C++.
    """

    def __init__(self, requeue: signal.Signals | None = None) -> None:
        self._requeue = requeue
        self.requested: signal.Signals | None = None
        self.requested_at_s: float | None = None
        self.is_called = False
        self.watch: Watch | None = None
        self.stop_coordinator: StopCoordinator | None = None
        self.heard = 0
        self._has_pipe = False
        self._earlier: dict[signal.Signals, Any] = {}  # Any: what signal.signal returns

    def __enter__(self) -> RunSignals:
        if threading.current_thread() is threading.main_thread():
            numbers = (signal.SIGINT, signal.SIGTERM)
            for number in numbers if self._requeue is None else (*numbers, self._requeue):
                self.listen_to(number)
        return self

    def listen_to(self, number: signal.Signals) -> bool:
        """Let a signal end this run as SIGTERM does; called in the main thread, while the run is guarded.

        Returns:
            Whether it will: a handler of the user's own stays, it knows better what its program wants.
        """
        if number not in self._earlier and signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            self._earlier[number] = signal.signal(number, self._on_signal)
        return number in self._earlier

    def request(self) -> None:
        """End the run as a signal would: between two steps, on all ranks alike. Called from any thread.

        Where the cluster can put the job back into the queue, it does, as after its own warning.
        """
        if self.requested is None:
            self.requested_at_s = time.monotonic()
            self.requested = self._requeue or signal.SIGTERM
            self.is_called = True

    def note_failed_save(self) -> None:
        """Let the main thread look, between two steps, how a save in the background went. Called from any thread."""
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
        """The signals that end the run; those for which the user has a handler are not among them."""
        return set(self._earlier)

    def connect(self, watch: Watch) -> None:
        """Let the ranks agree on where this run stops; on every rank, before the run's first phase.

        Raises:
            RankFailure: Another rank failed in an earlier run.
        """
        watch.begin_run()
        self.watch, self.stop_coordinator = watch, watch.stop_coordinator
        watch.run_signals = self
        if self._earlier and watch.signal_pipe is not None:
            self._has_pipe = _write_signals_to(watch.signal_pipe)

    def rejoin(self) -> None:
        """Take this run's place in the ranks' agreement again, after a run within it had it; on every rank."""
        assert self.watch is not None
        self.watch.begin_run()
        self.watch.run_signals = self

    def _disconnect(self) -> None:
        watch, coordinator = self.watch, self.stop_coordinator
        if watch is None or coordinator is None:
            return
        if self._has_pipe:
            _write_signals_nowhere()
        watch.run_signals = None
        if self.requested is not None:
            # If it came after the last phase, then the next run of all ranks stops where it begins.
            coordinator.request(self.requested.name)
        watch.end_run()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number)
        self.heard += 1
        if self.requested is not None and name is signal.SIGINT:
            raise KeyboardInterrupt
        if self.requested_at_s is None:
            self.requested_at_s = time.monotonic()
        # SIGTERM after Ctrl-C still means that the process is to go.
        self.requested = name
        self.is_called = True

    def check(self) -> None:
        """End the run if a signal asked for it; called between two optimizer steps, where there is one process.

        Raises:
            KeyboardInterrupt: After Ctrl-C.
            StopBySignal: After SIGTERM; the exit code is 143.
        """
        self.is_called = False
        if self.requested is None:
            return
        logger.warning("%s: the run ends here, between two steps", self.requested.name)
        if self.requested is signal.SIGINT:
            raise KeyboardInterrupt
        raise StopBySignal

    def stop(self) -> NoReturn:
        """End the run because all ranks agreed to, after a signal at one of them.

        Raises:
            KeyboardInterrupt: After Ctrl-C.
            StopBySignal: After SIGTERM; the exit code is 143.
        """
        assert self.stop_coordinator is not None
        logger.warning("%s: all ranks end the run here, between two steps", self.stop_coordinator.reason)
        raise self.stop_error()

    @property
    def is_to_requeue(self) -> bool:
        """Whether the run ended because the cluster asked for that, and not because of another signal."""
        if self._requeue is None:
            return False
        coordinator = self.stop_coordinator
        return self.requested is self._requeue if coordinator is None else coordinator.reason == self._requeue.name

    def stop_error(self) -> BaseException:
        """Return the error that ends a run on which all ranks agreed."""
        assert self.stop_coordinator is not None
        return KeyboardInterrupt() if self.stop_coordinator.reason == "SIGINT" else StopBySignal()


_has_fork_hook = False  # what is registered at fork stays; it is registered when a run first needs it


def _write_signals_to(pipe: int) -> bool:
    """Let the interpreter write each signal's number there, at once, also while the main thread is in C++.

    Returns:
        Whether it does; not where an event loop uses this already: then a hanging collective is not interrupted.
    """
    global _has_fork_hook
    earlier = signal.set_wakeup_fd(pipe, warn_on_full_buffer=False)
    if earlier != -1:
        signal.set_wakeup_fd(earlier)
        return False
    if not _has_fork_hook and hasattr(os, "register_at_fork"):
        # Ctrl-C in a terminal goes to loader workers, too; theirs must not be taken for a second one of ours.
        os.register_at_fork(after_in_child=_write_signals_nowhere)
        _has_fork_hook = True
    return True


def _write_signals_nowhere() -> None:
    signal.set_wakeup_fd(-1)


def add_place(error: BaseException, place: str) -> None:
    """Note on an exception where in the run it happened."""
    error.add_note(place)
