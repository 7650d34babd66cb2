"""Queues of a logger's writes, which lose nothing while it fails or hangs, and report it.

The Trainer has a `WriteBehind` for each logger with `writes_behind`, whose thread keeps a slow disk or service from
holding a step, and a `WriteInPlace` for any other logger that has failed.
"""

from __future__ import annotations

import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from multiprocessing.util import Finalize
from typing import Any, TypeAlias

from ..errors import ConfigError, LoopwrightError
from .pending import PendingQueue, Write

_PAUSES_S = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0)
_MOST_TRIES = 4
_LAST_PAUSES_S = (0.1, 0.5, 1.0)
# Lasting errors: trying again would block all later writes.
_LASTING = (
    LoopwrightError, TypeError, ValueError, LookupError, AttributeError, NameError, AssertionError, ImportError,
    NotImplementedError,
)  # fmt: skip

Action: TypeAlias = "Callable[[], object]"


def _call(action: Action) -> None:
    action()


class WriteQueue(ABC):
    """Writes in the order in which they came; one that fails is tried again, before those after it.

    An error of the program (TypeError, ValueError, ...) would come again: its write is set aside, and the next one is
    done. Anything else is taken as passing: the write is repeated after one second, two, four, up to a minute.

    Pickling and copying give an empty queue with the same arguments.

    Args:
        capacity: Writes kept in memory; more wait in a temporary file, if `perform` is given and they can be pickled.
        patience_s: Seconds after which a write counts as hanging.
        perform: Function that performs a write; by default writes are functions, which are called.
        pauses_s: Seconds between tries; the last one is repeated.

    Raises:
        ConfigError: `capacity` is not an integer from 1, or `patience_s` is not above 0.
    """

    _lw_caught: type[BaseException] = Exception
    _lw_is_hanging = False

    def __init__(
        self,
        capacity: int = 1024,
        *,
        patience_s: float = 60.0,
        perform: Callable[[Any], None] = _call,
        pauses_s: Sequence[float] = _PAUSES_S,
    ) -> None:
        if not isinstance(capacity, int) or capacity < 1 or not patience_s > 0:
            raise ConfigError(
                f"{type(self).__name__} got capacity={capacity!r} and patience_s={patience_s!r}; expected an "
                "integer from 1 and seconds above 0.",
                fix="leave both out, or pass for example capacity=1024, patience_s=60.",
            )
        self.capacity = capacity
        self.patience_s = patience_s
        self._lw_perform = perform
        self._lw_pauses_s = tuple(pauses_s)
        self._lw_changed = threading.Condition()
        self._lw_process = os.getpid()
        self._lw_reset()

    def _lw_reset(self) -> None:
        self._lw_waiting = PendingQueue(self.capacity)
        self._lw_aside = PendingQueue(self.capacity)
        self._lw_news: list[tuple[bool, str]] = []
        self._lw_failures = 0  # of the first write
        self._lw_has_rejected = False

    def __len__(self) -> int:
        """Return how many writes are not done yet."""
        return len(self._lw_waiting)

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.capacity, self.patience_s, self._lw_perform, self._lw_pauses_s))

    @abstractmethod
    def put(self, write: Write) -> None:
        """Let something be written after what waits already."""

    @abstractmethod
    def settle(self) -> bool:
        """Return whether all is written; False where the first write fails or hangs."""

    def insist(self, pauses_s: Sequence[float] = _LAST_PAUSES_S) -> bool:
        """Return whether all is written, after some more tries of a write that fails.

        Args:
            pauses_s: Between these tries.
        """
        is_written = self.settle()
        for pause_s in pauses_s:
            if is_written or self._lw_is_hanging:
                break
            time.sleep(pause_s)
            is_written = self.settle()
        return is_written

    @abstractmethod
    def close(self, pauses_s: Sequence[float] = _LAST_PAUSES_S) -> list[Write]:
        """End the queue and return what could not be written, that which was set aside first.

        Args:
            pauses_s: Between the last tries.
        """

    def wait(self) -> None:
        """Return when everything is written, or cannot be now."""
        self.settle()

    def news(self) -> list[tuple[bool, str]]:
        """Return news since the last call: whether each is about a failure, and its text."""
        with self._lw_here():
            news, self._lw_news = self._lw_news, []
        return news

    def try_now(self, action: Action) -> BaseException | None:
        """Call a function on this thread, where nothing waits.

        Returns:
            What it raised, if that may pass; else None, and what it raised is in `news`.
        """
        failure = self._lw_do(action)
        if failure is not None and _is_lasting(failure):
            with self._lw_here():
                self._lw_report(True, f"failed: {_named(failure)}")
            return None
        return failure

    def _lw_do(self, write: Write) -> BaseException | None:
        """Perform a write; returns what it raised."""
        try:
            write() if callable(write) else self._lw_perform(write)
        # Loggers are other people's code and services: anything may come.
        except self._lw_caught as error:
            return error
        return None

    def _lw_note(self, failure: BaseException | None) -> bool:
        """Take the first write away if it is done or hopeless; with the lock held. Returns whether it is."""
        if failure is None:
            self._lw_waiting.pop()
            if self._lw_failures:
                self._lw_report(False, f"works again after {self._lw_failures} failed tries; nothing was lost")
            self._lw_failures = 0
            return True
        if _is_lasting(failure):
            self._lw_aside.append(self._lw_waiting.pop())
            self._lw_failures = 0
            if not self._lw_has_rejected:
                self._lw_has_rejected = True
                self._lw_report(True, f"failed, and what it did not take is set aside: {_named(failure)}")
            return True
        self._lw_failures += 1
        if self._lw_failures == _MOST_TRIES and callable(self._lw_waiting.first()):
            # A picture, say: rows do not wait for it any longer.
            self._lw_waiting.pop()
            self._lw_report(
                True, f"failed {self._lw_failures} times, and something else than a row is left out: {_named(failure)}"
            )
            self._lw_failures = 0
            return True
        if self._lw_failures == 1:
            self._lw_report(True, f"failed, and is tried again while its rows wait: {_named(failure)}")
        return False

    def _lw_report(self, is_failure: bool, text: str) -> None:
        self._lw_news.append((is_failure, text))

    def _lw_pause_s(self) -> float:
        return self._lw_pauses_s[min(self._lw_failures, len(self._lw_pauses_s)) - 1]

    def _lw_take_undone(self) -> list[Write]:
        undone = [queue.pop() for queue in (self._lw_aside, self._lw_waiting) for _ in range(len(queue))]
        self._lw_aside.clear()
        self._lw_waiting.clear()
        self._lw_failures = 0
        return undone

    def _lw_here(self) -> threading.Condition:
        # A fork copies the queue, and not the thread, which may have held the lock at that moment: it starts again.
        # What waits is written by the process that put it in.
        if self._lw_process != os.getpid():
            self._lw_process = os.getpid()
            self._lw_changed = threading.Condition()
            self._lw_reset()
        return self._lw_changed


def _is_lasting(failure: BaseException) -> bool:
    if isinstance(failure, OSError):
        return False
    return isinstance(failure, _LASTING) or not isinstance(failure, Exception)


def _named(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _rebuild(
    kind: type[WriteQueue],
    capacity: int,
    patience_s: float,
    perform: Callable[[Any], None],
    pauses_s: Sequence[float],
) -> WriteQueue:
    return kind(capacity, patience_s=patience_s, perform=perform, pauses_s=pauses_s)


class WriteBehind(WriteQueue):
    """Write on another thread. `put` never waits.

    The thread starts with the first write and ends with `close`; a later `put` starts another.
    """

    _lw_caught = BaseException  # in the thread no other code would see it

    def _lw_reset(self) -> None:
        super()._lw_reset()
        self._lw_thread: threading.Thread | None = None
        self._lw_at_end: Finalize | None = None
        self._lw_busy_since: float | None = None
        self._lw_is_hanging = False
        self._lw_must_hurry = False
        self._lw_done = 0  # writes that are done or set aside
        self._lw_tries = 0

    def put(self, write: Write) -> None:
        """Let something be written after what waits already; returns at once."""
        with self._lw_here():
            self._lw_waiting.append(write)
            if self._lw_thread is None:
                self._lw_thread = threading.Thread(target=self._lw_work, name="write-behind", daemon=True)
                self._lw_thread.start()
                # A daemon, so that a hung service does not keep the process; what waits is written all the same.
                self._lw_at_end = Finalize(None, self.close, exitpriority=30)
            self._lw_look_for_hang()
            self._lw_changed.notify_all()

    def settle(self) -> bool:
        """Return whether all is written: False where the first write fails again, or does not end in time.

        On the queue's own thread it returns at once: what came before is done.
        """
        if threading.current_thread() is self._lw_thread:
            return True
        with self._lw_here():
            while len(self._lw_waiting):
                self._lw_look_for_hang()
                if self._lw_is_hanging:
                    return False
                failures, done, tries = self._lw_failures, self._lw_done, self._lw_tries
                self._lw_must_hurry = failures > 0
                self._lw_changed.notify_all()
                self._lw_changed.wait_for(
                    lambda done=done, tries=tries: self._lw_done != done or self._lw_tries != tries,  # type: ignore[misc]
                    self._lw_left_s(),
                )
                if self._lw_failures > failures:
                    return False
            return True

    def close(self, pauses_s: Sequence[float] = _LAST_PAUSES_S) -> list[Write]:
        """End the thread, after some last tries, and return what could not be written; see `WriteQueue.close`."""
        with self._lw_here():
            if self._lw_is_hanging:  # once more the patience for one write: then it may be over
                self._lw_is_hanging, self._lw_busy_since = False, time.monotonic()
        self.insist(pauses_s)
        return self.abandon()

    def abandon(self) -> list[Write]:
        """End the thread, and return what is not written; a write that hangs is among it, and left alone."""
        with self._lw_here():
            thread, self._lw_thread = self._lw_thread, None
            undone = self._lw_take_undone()
            is_idle = self._lw_busy_since is None
            self._lw_busy_since, self._lw_is_hanging = None, False
            self._lw_changed.notify_all()
        if thread is not None:
            if self._lw_at_end is not None:
                self._lw_at_end.cancel()
            if is_idle and thread is not threading.current_thread():
                thread.join()
        return undone

    def _lw_work(self) -> None:
        mine = threading.current_thread()
        while True:
            with self._lw_changed:
                while not len(self._lw_waiting):
                    if self._lw_thread is not mine:
                        return
                    self._lw_changed.wait()
                if self._lw_thread is not mine:
                    return
                write = self._lw_waiting.first()
                self._lw_busy_since = time.monotonic()
            failure = self._lw_do(write)
            with self._lw_changed:
                if self._lw_thread is not mine:  # abandoned meanwhile: the waiting writes belong to another thread
                    return
                self._lw_busy_since = None
                if self._lw_is_hanging:
                    self._lw_is_hanging = False
                    self._lw_report(False, "has ended the write that took long; nothing was lost")
                self._lw_tries += 1
                self._lw_done += self._lw_note(failure)
                self._lw_changed.notify_all()
                if self._lw_failures:
                    self._lw_changed.wait_for(
                        lambda: self._lw_must_hurry or self._lw_thread is not mine, timeout=self._lw_pause_s()
                    )
                self._lw_must_hurry = False

    def _lw_left_s(self) -> float:
        return max(0.001, self.patience_s - (time.monotonic() - (self._lw_busy_since or time.monotonic())))

    def _lw_look_for_hang(self) -> None:
        since = self._lw_busy_since
        if since is not None and not self._lw_is_hanging and time.monotonic() - since >= self.patience_s:
            self._lw_is_hanging = True
            self._lw_report(True, f"has not ended a write within {self.patience_s:g} s; its rows wait meanwhile")


class WriteInPlace(WriteQueue):
    """Write on the caller's thread, at `put` and `settle`; after a failure `put` tries again when its pause is over."""

    def _lw_reset(self) -> None:
        super()._lw_reset()
        self._next_try = 0.0

    def put(self, write: Write) -> None:
        """Write what waits, and this; where that fails, let it wait."""
        self._lw_here()
        self._lw_waiting.append(write)
        if not self._lw_failures or time.monotonic() >= self._next_try:
            self.settle()

    def settle(self) -> bool:
        """Try to write what waits; return whether all is written."""
        self._lw_here()
        while len(self._lw_waiting):
            if not self._lw_note(self._lw_do(self._lw_waiting.first())):
                self._next_try = time.monotonic() + self._lw_pause_s()
                return False
        return True

    def close(self, pauses_s: Sequence[float] = _LAST_PAUSES_S) -> list[Write]:
        """Try some last times, and return what could not be written; see `WriteQueue.close`."""
        self.insist(pauses_s)
        return self._lw_take_undone()
