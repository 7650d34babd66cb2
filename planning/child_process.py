"""`run_in_child` and `Child`: a function in a separate process, whose changes and imports end with it."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Self, TypeVar, cast

import torch

from ..errors import LaunchError
from ..fabric.launch.parent_watchdog import watch_parent_process

T = TypeVar("T")
Send = Callable[[object], None]
_POLL_S = 0.1


def can_copy_process() -> bool:
    """Return whether this process can be copied."""
    return hasattr(os, "fork") and not multiprocessing.current_process().daemon


def run_in_child(function: Callable[[], T]) -> T:
    """Return the result of a function in a copy of this process; if processes cannot be copied, call it here.

    Args:
        function: The function; its result must be picklable.

    Raises:
        LaunchError: The process ended without a result.
        Exception: Of the function, with its traceback as a note.
    """
    if not can_copy_process():
        return function()
    process, receiver = _start(lambda send: send(function()))
    try:
        return cast("T", _receive(process, receiver))
    finally:
        receiver.close()
        process.join()


class Child:
    """A function in a copy of this process, which sends what it finds one after the other, and can be ended.

    A context: its end ends the process, and those that it has started.

    Args:
        work: The function; it is passed another one, which sends a picklable object to `receive`.
    """

    def __init__(self, work: Callable[[Send], None]) -> None:
        self._process, self._receiver = _start(work, leads=True)
        self._group = cast("int", self._process.pid)
        with suppress(OSError):  # the child does the same: whichever is first
            os.setpgid(self._group, self._group)

    def __enter__(self) -> Self:
        return self

    def receive(self, until: float | None = None, check: Callable[[], None] = lambda: None) -> object:
        """Return the next object.

        Args:
            until: Time of the monotonic clock after which no object is awaited; None: no limit.
            check: Called several times per second; may raise an error to stop waiting.

        Raises:
            TimeoutError: No object came in time.
            LaunchError: The process ended without another object.
            Exception: Of the function, with its traceback as a note.
        """
        while not self._receiver.poll(_POLL_S):
            check()
            if until is not None and time.monotonic() >= until:
                raise TimeoutError
        return _receive(self._process, self._receiver)

    def __exit__(self, *error: object) -> None:
        with suppress(ProcessLookupError, PermissionError):  # it has ended; macOS refuses for one that is ending
            os.killpg(self._group, signal.SIGKILL)
        self._receiver.close()
        self._process.join()


def _start(
    work: Callable[[Send], None], *, leads: bool = False
) -> tuple[multiprocessing.context.ForkProcess, Connection]:
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(work, sender, leads))
    sys.stdout.flush()
    sys.stderr.flush()
    process.start()
    sender.close()
    return process, receiver


def _receive(process: multiprocessing.context.ForkProcess, receiver: Connection) -> object:
    try:
        outcome = receiver.recv()
    except EOFError:
        process.join()
        raise LaunchError(
            f"Expected a result from the process that plans, got its end with exit code {process.exitcode}.",
            fix="see its messages above; free memory of the host, or plan a smaller batch.",
        ) from None
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome[0]


def _run(work: Callable[[Send], None], sender: Connection, leads: bool) -> None:
    if leads:
        os.setpgid(0, 0)  # the terminal's Ctrl-C goes to the parent alone, which ends this group
        watch_parent_process()
    torch.set_num_threads(1)  # a fork copies no threads: work for those of the parent would never end
    outcome: object
    try:
        work(lambda found: sender.send((found,)))
    except BaseException as error:
        error.add_note(f"--- in the process that plans ---\n{''.join(traceback.format_tb(error.__traceback__))}")
        try:
            pickle.loads(pickle.dumps(error))
            outcome = error
        except Exception:  # whatever the user's exception does when it is copied
            outcome = RuntimeError(f"{type(error).__name__}: {error}")
        sender.send(outcome)
    finally:
        sender.close()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
