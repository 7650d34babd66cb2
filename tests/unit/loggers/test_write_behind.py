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


def test_actions_are_done_in_order_on_another_thread() -> None:
    queue, done = WriteBehind(), []
    for number in range(500):
        queue.put(lambda number=number: done.append((number, threading.current_thread())))
    queue.close()
    assert [number for number, _ in done] == list(range(500))
    assert threading.current_thread() not in {thread for _, thread in done}


def test_a_full_queue_waits_and_loses_nothing() -> None:
    queue, done, gate = WriteBehind(2), [], threading.Event()
    queue.put(gate.wait)
    while len(queue) > 1:
        pass
    queue.put(lambda: done.append(1))
    queue.put(lambda: done.append(2))
    assert len(queue) == 3
    putting = threading.Thread(target=lambda: queue.put(lambda: done.append(3)))
    putting.start()
    putting.join(0.05)
    assert putting.is_alive()
    gate.set()
    putting.join(5)
    queue.close()
    assert done == [1, 2, 3]


@pytest.mark.parametrize("verb", ["put", "settle", "close"])
def test_a_failure_is_raised_once_and_what_came_behind_it_is_dropped(verb: str) -> None:
    queue, done = WriteBehind(), []

    def fail() -> None:
        raise OSError("disk full")

    gate = threading.Event()
    queue.put(gate.wait)
    queue.put(fail)
    queue.put(lambda: done.append("behind"))
    gate.set()
    queue.wait()  # raises nothing
    with pytest.raises(OSError, match="disk full"):
        queue.put(lambda: None) if verb == "put" else getattr(queue, verb)()
    queue.put(lambda: done.append("after"))
    queue.close()
    assert done == ["after"]


def test_an_action_that_hangs_is_given_up() -> None:
    queue, gate = WriteBehind(patience_s=0.05), threading.Event()
    queue.put(gate.wait)
    queue.put(lambda: None)
    with pytest.raises(TimeoutError, match=r"within 0\.05 s; 2 writes are given up"):
        queue.settle()
    queue.abandon()
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
