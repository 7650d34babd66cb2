"""Signal wakeup: signals that arrive while the main thread is in C++ and cannot run a handler."""

from __future__ import annotations

import os
import signal
from typing import Protocol

from .stop_coordinator import StopCoordinator

_UNHANDLED_S = 1.0  # for the main thread to handle the second Ctrl-C


class SignalCounter(Protocol):
    """The signal handlers of a run, which count how often they ran."""

    requested: signal.Signals | None
    num_handled: int

    @property
    def handled(self) -> set[signal.Signals]:
        """Signals that have a handler."""


class SignalWakeup:
    """Forwards signals from a wakeup file descriptor to the stop coordinator.

    Attributes:
        pipe: For `signal.set_wakeup_fd`; None while it is closed.
    """

    def __init__(self) -> None:
        self.pipe: int | None = None
        self._read_end = -1
        self._seen: tuple[SignalCounter, signal.Signals] | None = None
        self._interrupted: tuple[SignalCounter | None, int] = (None, 0)
        self._interrupted_at: tuple[float, int] | None = None

    def open(self) -> None:
        """Create the pipe."""
        self._read_end, self.pipe = os.pipe()
        for end in (self._read_end, self.pipe):
            os.set_blocking(end, False)

    def close(self) -> None:
        """Close the pipe."""
        if self.pipe is not None:
            os.close(self._read_end)
            os.close(self.pipe)
            self.pipe = None

    def forward(self, run_signals: SignalCounter | None, coordinator: StopCoordinator, now: float) -> bool:
        """Request a stop if there was a signal.

        Returns:
            Whether Ctrl-C was pressed twice and the main thread has not handled it a second later; True once.
        """
        try:
            numbers = os.read(self._read_end, 256)
        except BlockingIOError:  # the usual case: there was none
            numbers = b""
        if run_signals is None:
            return False
        if run_signals is not self._interrupted[0]:
            self._interrupted, self._interrupted_at = (run_signals, 0), None
        handled = run_signals.handled
        for number in numbers:
            if number in handled:
                coordinator.request(signal.Signals(number).name)
            if number == signal.SIGINT and number in handled:
                self._interrupted = (run_signals, self._interrupted[1] + 1)
                if self._interrupted[1] == 2:
                    self._interrupted_at = (now, run_signals.num_handled)
        requested = run_signals.requested
        if requested is not None and (run_signals, requested) != self._seen:
            self._seen = (run_signals, requested)
            coordinator.request(requested.name)
        if self._interrupted_at is None or now <= self._interrupted_at[0] + _UNHANDLED_S:
            return False
        is_unhandled, self._interrupted_at = run_signals.num_handled == self._interrupted_at[1], None
        return is_unhandled
