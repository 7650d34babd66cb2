"""A process that plans: it sends what it finds, and ends with all that it has started."""

from __future__ import annotations

import os
import time

import pytest

from loopwright.errors import LaunchError
from loopwright.planning.child_process import Child, Send, run_in_child


def test_what_is_found_arrives_one_by_one_and_an_error_with_its_place() -> None:
    def work(send: Send) -> None:
        send(1)
        send("two")
        raise ZeroDivisionError("mine")

    with Child(work) as child:
        assert [child.receive(), child.receive()] == [1, "two"]
        with pytest.raises(ZeroDivisionError, match="mine") as caught:
            child.receive()
    assert "in work" in caught.value.__notes__[0]


def test_a_process_that_takes_too_long_ends_with_those_that_it_has_started() -> None:
    def forever(send: Send) -> None:
        def inner() -> None:
            send(os.getpid())
            time.sleep(1000)

        run_in_child(inner)

    with Child(forever) as child:
        inner = child.receive()
        assert isinstance(inner, int)
        with pytest.raises(TimeoutError):
            child.receive(until=time.monotonic())
    # It is a zombie until its new parent has seen its end, if not gone.
    for _ in range(1000):
        try:
            os.kill(inner, 0)
        except ProcessLookupError:
            break
        with open(f"/proc/{inner}/stat") as file:
            if file.read().split()[2] == "Z":
                break
        time.sleep(0.01)
    else:
        pytest.fail("the inner process still runs")


def test_waiting_can_be_interrupted() -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), Child(lambda send: time.sleep(1000)) as child:
        child.receive(check=interrupt)


def test_a_process_that_dies_is_an_error() -> None:
    with pytest.raises(LaunchError, match="exit code 7"), Child(lambda send: os._exit(7)) as child:
        child.receive()
