from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import threading
from typing import Any

import pytest

from loopwright.errors import ConfigError
from loopwright.loggers import WriteBehind
from loopwright.loggers.pending import PendingQueue
from loopwright.loggers.write_behind import WriteInPlace, WriteQueue


def test_actions_are_done_in_order_on_another_thread() -> None:
    queue, done = WriteBehind(), []
    for number in range(500):
        queue.put(lambda number=number: done.append((number, threading.current_thread())))
    queue.close()
    assert [number for number, _ in done] == list(range(500))
    assert threading.current_thread() not in {thread for _, thread in done}


def test_what_does_not_fit_into_memory_waits_in_a_file() -> None:
    done: list[Any] = []
    gate = threading.Event()
    queue = WriteBehind(3, perform=done.append)
    queue.put(gate.wait)
    for number in range(50):
        queue.put({"number": number})
        if number == 20:
            queue.put(lambda: done.append("function"))
    assert len(queue) == 52
    assert len(queue._lw_waiting._items) <= 3
    gate.set()
    assert queue.close() == []
    expected: list[Any] = [{"number": number} for number in range(50)]
    assert done == [*expected[:21], "function", *expected[21:]]


def test_places_in_memory_and_file_can_change_while_items_come() -> None:
    pending, taken = PendingQueue(2), []
    for number in range(200):
        pending.append(number)
        if number % 3:
            taken.append(pending.pop())
    while len(pending):
        taken.append(pending.pop())
    assert taken == list(range(200))
    assert pending._file is None


class Failing:
    """Fails some times, and then works."""

    def __init__(self, times: int, error: Exception) -> None:
        self.times, self.error = times, error
        self.done: list[Any] = []

    def __call__(self, item: Any) -> None:
        if self.times and item == 1:
            self.times -= 1
            raise self.error
        self.done.append(item)


@pytest.mark.parametrize("kind", [WriteBehind, WriteInPlace])
def test_a_write_that_fails_is_tried_again_before_those_behind_it(kind: type[WriteQueue]) -> None:
    perform = Failing(3, OSError("no route to host"))
    queue = kind(perform=perform, pauses_s=[1000])
    for number in range(4):
        queue.put(number)
    while not queue.settle():  # each one is a try
        assert perform.done == [0]
    assert perform.done == [0, 1, 2, 3]
    said = queue.news()
    assert [is_failure for is_failure, _ in said] == [True, False]
    assert "OSError: no route to host" in said[0][1]
    assert "works again after" in said[1][1]
    assert queue.news() == []
    assert queue.close() == []


@pytest.mark.parametrize("kind", [WriteBehind, WriteInPlace])
def test_an_error_of_the_program_does_not_hold_up_what_is_behind_it(kind: type[WriteQueue]) -> None:
    perform = Failing(9, ValueError("not a number"))
    queue = kind(perform=perform)
    for number in (0, 1, 2, 1):
        queue.put(number)
    assert queue.settle()
    assert perform.done == [0, 2]
    assert [text for _, text in queue.news()] == [
        "failed, and what it did not take is set aside: ValueError: not a number"
    ]
    assert queue.close() == [1, 1]


@pytest.mark.parametrize("kind", [WriteBehind, WriteInPlace])
def test_what_cannot_be_written_comes_back_at_the_end(kind: type[WriteQueue]) -> None:
    queue = kind(perform=Failing(99, OSError("gone")))
    for number in (0, 1, 2):
        queue.put(number)
    assert queue.close(pauses_s=[0.001, 0.001]) == [1, 2]
    assert len(queue) == 0


def test_a_write_that_hangs_is_said_and_loses_nothing() -> None:
    done: list[Any] = []
    gate = threading.Event()
    queue = WriteBehind(patience_s=0.05, perform=done.append)
    queue.put(gate.wait)
    queue.put(1)
    assert not queue.settle()
    assert not queue.settle()  # at once
    queue.put(2)
    assert [text for _, text in queue.news()] == ["has not ended a write within 0.05 s; its rows wait meanwhile"]
    gate.set()
    while len(queue):
        pass
    assert queue.settle()
    assert done == [1, 2]
    assert [text for _, text in queue.news()] == ["has ended the write that took long; nothing was lost"]
    assert queue.close() == []


def test_a_write_that_hangs_to_the_end_comes_back_with_what_is_behind_it() -> None:
    gate = threading.Event()
    queue = WriteBehind(patience_s=0.05, perform=lambda item: gate.wait())
    queue.put(1)
    queue.put(2)
    assert queue.close() == [1, 2]
    gate.set()


def test_patience_is_for_one_action_and_not_for_all() -> None:
    queue, done = WriteBehind(patience_s=0.2), []
    for _ in range(6):
        queue.put(lambda: done.append(threading.Event().wait(0.06)))
    queue.settle()
    assert len(done) == 6
    queue.close()


def test_the_thread_ends_with_close_and_begins_again() -> None:
    before = threading.active_count()
    queue, done = WriteBehind(), []
    for number in range(2):
        queue.put(lambda number=number: done.append(number))
        queue.close()
        assert threading.active_count() == before
    queue.close()
    assert done == [0, 1]


def test_waiting_on_its_own_thread_returns_at_once() -> None:
    queue, done = WriteBehind(), []
    queue.put(lambda: (queue.wait(), done.append(1)))
    queue.close()
    assert done == [1]


def test_a_copy_is_empty() -> None:
    queue, gate = WriteBehind(7, patience_s=3.0), threading.Event()
    queue.put(gate.wait)
    for copied in (copy.deepcopy(queue), pickle.loads(pickle.dumps(queue))):
        assert (len(copied), copied.capacity, copied.patience_s) == (0, 7, 3.0)
        copied.close()
    gate.set()
    queue.close()


def test_a_forked_process_leaves_the_waiting_writes_to_its_parent() -> None:
    code = """
import os, sys, threading
from loopwright.loggers.write_behind import WriteBehind
queue, gate = WriteBehind(), threading.Event()
queue.put(gate.wait)
queue.put(lambda: os.write(1, b"parent "))
child = os.fork()
if child == 0:
    queue.wait()
    queue.put(lambda: os.write(1, b"child "))
    queue.close()
    os._exit(0)
os.waitpid(child, 0)
gate.set()
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True)
    assert done.stdout == b"child parent "  # the parent's was written when it ended, without close


@pytest.mark.parametrize("wrong", [{"capacity": 0}, {"capacity": 1.5}, {"patience_s": 0}])
def test_bad_sizes(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="WriteBehind"):
        WriteBehind(**wrong)
