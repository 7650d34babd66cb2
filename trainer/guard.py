"""Watches a run: Ctrl-C and SIGTERM end it between two optimizer steps, errors say where they happened.

Entered by the Trainer around each fit, validate, test and predict. The signal handlers only set a flag; the loops look
at it at step boundaries. A second Ctrl-C interrupts at once.
"""

from __future__ import annotations

import logging
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

from ..errors import StopBySignal

__all__ = ["Guard"]

logger = logging.getLogger(__name__)


class Guard:
    """Holds the signal handlers of one run and gives back the earlier ones after it.

    Attributes:
        requested: The signal that asked the run to end, None while there is none.
    """

    def __init__(self) -> None:
        self.requested: signal.Signals | None = None
        self._earlier: dict[signal.Signals, Any] = {}  # Any: what signal.signal returns

    def __enter__(self) -> Guard:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                earlier = signal.getsignal(number)
                # A handler of the user's own stays: it knows better what its program wants.
                if earlier in (signal.SIG_DFL, signal.default_int_handler):
                    self._earlier[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, earlier in self._earlier.items():
            signal.signal(number, earlier)
        self._earlier.clear()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number)
        if self.requested is not None and name is signal.SIGINT:
            raise KeyboardInterrupt
        self.requested = name

    def check(self) -> None:
        """End the run if a signal asked for it; called between two optimizer steps.

        Raises:
            KeyboardInterrupt: After Ctrl-C.
            StopBySignal: After SIGTERM; the exit code is 143.
        """
        if self.requested is None:
            return
        logger.warning("%s: the run ends here, between two steps", self.requested.name)
        if self.requested is signal.SIGINT:
            raise KeyboardInterrupt
        raise StopBySignal


def add_place(error: BaseException, place: str) -> None:
    """Note on an exception where in the run it happened."""
    error.add_note(place)
