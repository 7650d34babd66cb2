"""A bounded queue and a thread that does what is put in, in order: so that a slow disk or service does not hold a step.

The Trainer has one for each logger with `writes_behind`; anyone else may use it alone.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from ..errors import ConfigError

__all__ = ["WriteBehind"]


class WriteBehind:
    """Do actions on another thread, one after the other, in the order in which they came.

    Nothing is ever dropped while the actions succeed: where the queue is full, `put` waits for room. The first action
    that fails is the last: those behind it are dropped, and its exception is raised once, by the next `put`, `settle`
    or `close`. The thread starts with the first action and ends with `close`; a later `put` starts another.

    Pickling and copying give an empty queue of the same size: a thread belongs to its process.

    Args:
        capacity: Actions that may wait.
        patience_s: How long `put`, `settle` and `close` wait for one action to end, in seconds.

    Raises:
        ConfigError: `capacity` is not a whole number from 1, or `patience_s` is not above 0.
    """

    def __init__(self, capacity: int = 1024, *, patience_s: float = 60.0) -> None:
        if not isinstance(capacity, int) or capacity < 1 or not patience_s > 0:
            raise ConfigError(
                f"WriteBehind got capacity={capacity!r} and patience_s={patience_s!r}; expected a whole number from 1 "
                "and seconds above 0.",
                fix="leave both out, or pass for example capacity=1024, patience_s=60.",
            )
        self.capacity = capacity
        self.patience_s = patience_s
        self._waiting: deque[Callable[[], Any]] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._process = os.getpid()
        self._failure: BaseException | None = None
        self._is_busy = False
        self._done = 0

    def __len__(self) -> int:
        """Return how many actions are not done yet."""
        return len(self._waiting) + self._is_busy

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (self.capacity, self.patience_s))

    def put(self, action: Callable[[], Any]) -> None:
        """Let the action be done after those that wait already; only where the queue is full, wait for room.

        Raises:
            TimeoutError: The queue is full, and none of its actions ended within `patience_s`.
            BaseException: What an earlier action raised, once.
        """
        with self._here():
            self._raise_failure()
            self._wait_until(lambda: len(self._waiting) < self.capacity or self._failure is not None)
            self._raise_failure()
            self._waiting.append(action)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="write-behind", daemon=True)
                self._thread.start()
                # A daemon, so that a hung service does not keep the process; what waits is written all the same.
                atexit.register(self._close_at_exit)
            self._changed.notify_all()

    def wait(self) -> None:
        """Return when everything that was put in is done, or failed, or will not end; raise nothing.

        On the queue's own thread it returns at once: what came before is done.
        """
        if threading.current_thread() is self._thread:
            return
        with self._here():
            self._wait_until(lambda: not (self._waiting or self._is_busy))

    def settle(self) -> None:
        """Return when everything that was put in is done.

        Raises:
            TimeoutError: One action did not end within `patience_s`.
            BaseException: What an action raised, once.
        """
        with self._here():
            self._wait_until(lambda: not (self._waiting or self._is_busy))
            self._raise_failure()

    def close(self) -> None:
        """Settle and end the thread.

        Raises:
            TimeoutError: One action did not end within `patience_s`; the thread is left behind.
            BaseException: What an action raised, once.
        """
        try:
            self.settle()
        finally:
            self.abandon()

    def abandon(self) -> None:
        """End the thread, and drop what waits and an exception that nobody was told. An action that runs is left."""
        with self._here():
            thread, self._thread = self._thread, None
            self._waiting.clear()
            self._failure = None
            is_idle = not self._is_busy
            self._changed.notify_all()
        if thread is not None:
            atexit.unregister(self._close_at_exit)
            if is_idle:
                thread.join()

    def _work(self) -> None:
        mine = threading.current_thread()
        while True:
            with self._changed:
                while not self._waiting:
                    if self._thread is not mine:
                        return
                    self._changed.wait()
                action = self._waiting.popleft()
                self._is_busy = True
                self._changed.notify_all()  # there is room
            failure: BaseException | None = None
            try:
                action()
            # Whatever it is, it belongs to the thread that put the action in, and is raised there.
            except BaseException as error:
                failure = error
            with self._changed:
                self._is_busy = False
                self._done += 1
                if failure is not None and self._thread is mine:
                    self._failure = failure
                    self._waiting.clear()
                self._changed.notify_all()

    def _wait_until(self, is_reached: Callable[[], bool]) -> None:
        """Wait with the lock held; give up when not one action ends within the time."""
        while not is_reached():
            before = self._done
            if not self._changed.wait_for(lambda before=before: is_reached() or self._done != before, self.patience_s):  # type: ignore[misc]
                self._failure = TimeoutError(
                    f"a write did not end within {self.patience_s:g} s; {len(self)} writes are given up, it among them"
                )
                self._waiting.clear()
                return

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _here(self) -> threading.Condition:
        # A fork copies the queue, and not the thread, which may have held the lock at that moment: it begins anew.
        # What waits is done by the process that put it in.
        if self._process != os.getpid():
            self._process = os.getpid()
            self._changed = threading.Condition()
            self._waiting = deque()
            self._thread, self._failure, self._is_busy = None, None, False
        return self._changed

    def _close_at_exit(self) -> None:
        if self._process == os.getpid():
            self.close()


def _rebuild(capacity: int, patience_s: float) -> WriteBehind:
    return WriteBehind(capacity, patience_s=patience_s)
