"""Holding off what raises for a dead loader worker, while an error is looked at."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_DEATH = "DataLoader worker"  # how torch's message begins


@contextmanager
def without_child_signals(error: BaseException) -> Iterator[None]:
    """Hold off torch's handler of SIGCHLD, which raises for a dead loader worker anywhere in the main thread.

    Args:
        error: The error that is looked at. It gets a note if the handler raises before it is held off.
    """
    handler: object = None
    while True:
        try:
            handler = signal.getsignal(signal.SIGCHLD)
            if callable(handler) and threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            else:
                handler = None
            break
        except RuntimeError as death:
            error.add_note(str(death))
    try:
        yield
    finally:
        if callable(handler):
            signal.signal(signal.SIGCHLD, handler)


def note_dead_worker(error: BaseException) -> bool:
    """Add to an error's notes that a loader worker of this process has died, which torch says once; False without."""
    if any(note.startswith(_DEATH) for note in getattr(error, "__notes__", ())):
        return True
    workers = sys.modules.get("torch.utils.data._utils.signal_handling")
    if workers is None:
        return False
    try:
        workers._error_if_any_worker_fails()
    except RuntimeError as death:
        error.add_note(str(death))
        return True
    return False
