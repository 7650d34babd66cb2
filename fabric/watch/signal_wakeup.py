"""Signals as the watch hears them, also while the main thread is in C++ and runs no handler."""

from __future__ import annotations

import os
import signal
from typing import Protocol

from .stop_coordinator import StopGate

__all__ = ["Guard", "HeardSignals"]

_DEAF_S = 1.0  # for the main thread to hear the second Ctrl-C


class Guard(Protocol):
    """What guards a run: it has handlers for some signals, and counts how many of them ran."""

    requested: signal.Signals | None
    heard: int

    @property
    def handled(self) -> set[signal.Signals]:
        """Signals that it handles."""


class HeardSignals:
    """Brings signals that a run's guard handles to the gate.

    Attributes:
        pipe: For `signal.set_wakeup_fd`; None while it is closed.
    """

    def __init__(self) -> None:
        self.pipe: int | None = None
        self._read_end = -1
        self._seen: tuple[Guard, signal.Signals] | None = None
        self._interrupted: tuple[Guard | None, int] = (None, 0)
        self._interrupted_at: tuple[float, int] | None = None

    def open(self) -> None:
        """Make the pipe."""
        self._read_end, self.pipe = os.pipe()
        for end in (self._read_end, self.pipe):
            os.set_blocking(end, False)

    def close(self) -> None:
        """Give the pipe back."""
        if self.pipe is not None:
            os.close(self._read_end)
            os.close(self.pipe)
            self.pipe = None

    def hand_on(self, guard: Guard | None, gate: StopGate, now: float) -> bool:
        """Ask the gate for a stop if there was a signal.

        Returns:
            Whether Ctrl-C came twice, and the main thread has not heard it a second later; said once.
        """
        try:
            numbers = os.read(self._read_end, 256)
        except BlockingIOError:  # the usual case: there was none
            numbers = b""
        if guard is None:
            return False
        if guard is not self._interrupted[0]:
            self._interrupted, self._interrupted_at = (guard, 0), None
        handled = guard.handled
        for number in numbers:
            if number in handled:
                gate.request(signal.Signals(number).name)
            if number == signal.SIGINT and number in handled:
                self._interrupted = (guard, self._interrupted[1] + 1)
                if self._interrupted[1] == 2:
                    self._interrupted_at = (now, guard.heard)
        requested = guard.requested
        if requested is not None and (guard, requested) != self._seen:
            self._seen = (guard, requested)
            gate.request(requested.name)
        if self._interrupted_at is None or now <= self._interrupted_at[0] + _DEAF_S:
            return False
        is_deaf, self._interrupted_at = guard.heard == self._interrupted_at[1], None
        return is_deaf
