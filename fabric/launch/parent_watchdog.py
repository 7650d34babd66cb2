"""Ties a process to the one that started it: when that one is gone, however it went, this one ends."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import threading

__all__ = ["Lifeline", "tie_to_parent", "tie_to_parent_process"]

log = logging.getLogger(__name__)

VARIABLE = "LOOPWRIGHT_PARENT"
_PR_SET_PDEATHSIG = 1


class Lifeline:
    """The parent's end: a pipe that the system closes when the parent ends, whatever the reason.

    Attributes:
        variables: What the children need in their environment.
        descriptors: What `subprocess.Popen(pass_fds=...)` is to hand on.
    """

    def __init__(self) -> None:
        self.variables: dict[str, str] = {}
        self.descriptors: tuple[int, ...] = ()
        if os.name == "posix":
            self._read, self._write = os.pipe()  # not inherited by exec, so that only this process holds `_write`
            # The kernel's signal comes when the *thread* ends that started the child: only the main one outlives all.
            is_main = int(threading.current_thread() is threading.main_thread())
            self.variables = {VARIABLE: f"{os.getpid()}:{self._read}:{is_main}"}
            self.descriptors = (self._read,)

    def hand_over(self) -> None:
        """Close the children's end here, when they have been started."""
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors = ()

    def close(self) -> None:
        """Let go of the pipe; children that still run end."""
        if self.variables:
            os.close(self._write)
            self.variables = {}


def tie_to_parent() -> None:
    """End this process when the `Lifeline` in its environment breaks; do nothing without one, or the second time."""
    text = os.environ.pop(VARIABLE, None)  # not for processes that this one starts
    if text is None:
        return
    parent, descriptor, is_main = (int(part) for part in text.split(":"))
    if is_main:
        _ask_kernel(parent)
    try:
        os.set_inheritable(descriptor, False)
    except OSError:  # it was closed on the way here: the kernel's signal remains
        log.debug("the pipe to process %d is closed", parent)
        return
    threading.Thread(target=_read_until_closed, args=(descriptor,), name="loopwright-lifeline", daemon=True).start()


def tie_to_parent_process() -> None:
    """End this process, which multiprocessing started, when the one that started it ends."""
    parent = multiprocessing.parent_process()
    if parent is None or parent.pid is None:
        return
    _ask_kernel(parent.pid if os.getppid() == parent.pid else None)
    threading.Thread(target=_join, args=(parent,), name="loopwright-lifeline", daemon=True).start()


def _ask_kernel(parent: int | None) -> None:
    """Let Linux kill this process when its parent ends: this works where Python cannot run, as in a long call of C."""
    if not sys.platform.startswith("linux"):
        return
    import ctypes

    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if parent is not None and os.getppid() != parent:
        os._exit(1)  # it ended before we asked


def _read_until_closed(descriptor: int) -> None:
    while os.read(descriptor, 1):
        pass
    os._exit(1)


def _join(parent: multiprocessing.process.BaseProcess) -> None:
    parent.join()
    os._exit(1)
