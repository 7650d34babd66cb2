"""Parent watchdog: ends a process when the process that started it has ended, for whatever reason."""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import os
import signal
import sys
import threading

log = logging.getLogger(__name__)

VARIABLE = "LOOPWRIGHT_PARENT"
_PR_SET_PDEATHSIG = 1


class ParentWatchdog:
    """The parent's side: a pipe that the system closes when the parent ends, for whatever reason.

    Attributes:
        variables: Environment variables for the children.
        descriptors: File descriptors for `subprocess.Popen(pass_fds=...)`.
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

    def close_read_end(self) -> None:
        """Close the children's end of the pipe in this process, after they have started."""
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors = ()

    def send(self, message: bytes) -> None:
        """Write to the pipe, for a child that reads it before it calls `watch_parent`.

        Raises:
            OSError: No child has the pipe open anymore.
        """
        while message:
            message = message[os.write(self._write, message) :]

    def close(self) -> None:
        """Close the pipe; children that still run end."""
        if self.variables:
            os.close(self._write)
            self.variables = {}


def watch_parent() -> None:
    """End this process when its parent ends; do nothing without a watchdog in the environment, or on a second call."""
    text = os.environ.pop(VARIABLE, None)  # not for processes that this one starts
    if text is None:
        return
    parent, descriptor, is_main = (int(part) for part in text.split(":"))
    if is_main:
        _set_death_signal(parent)
    try:
        os.set_inheritable(descriptor, False)
    except OSError:  # an intermediate process closed it: the kernel's signal remains
        log.debug("the pipe to process %d is closed", parent)
        return
    threading.Thread(
        target=_read_until_closed, args=(descriptor,), name="loopwright-parent-watchdog", daemon=True
    ).start()


def watch_parent_process() -> None:
    """End this process, which multiprocessing started, when its parent ends."""
    parent = multiprocessing.parent_process()
    if parent is None or parent.pid is None:
        return
    _set_death_signal(parent.pid if os.getppid() == parent.pid else None)
    threading.Thread(target=_join, args=(parent,), name="loopwright-parent-watchdog", daemon=True).start()


def _set_death_signal(parent: int | None) -> None:
    """Make Linux kill this process when its parent ends, which works also during a long C call."""
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if parent is not None and os.getppid() != parent:
        os._exit(1)  # it ended before the call above


def _read_until_closed(descriptor: int) -> None:
    while os.read(descriptor, 1):
        pass
    os._exit(1)


def _join(parent: multiprocessing.process.BaseProcess) -> None:
    parent.join()
    os._exit(1)
