"""The run_signals of a run: flags set by handlers, and how it works with the ranks' watch."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest
import torch.distributed as dist

from loopwright.errors import StopBySignal
from loopwright.fabric.watch import Watch
from loopwright.trainer.loop.run_signals import RunSignals


def send(number: signal.Signals) -> None:
    """Let a signal come to this process, whose handler runs before this returns."""
    signal.raise_signal(number)


def wait_until(condition: Callable[[], bool]) -> None:
    ends = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.01)


@pytest.mark.parametrize(("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, StopBySignal)])
def test_a_signal_ends_the_run_at_the_next_boundary(number: signal.Signals, error: type[BaseException]) -> None:
    with RunSignals() as run_signals:
        run_signals.check()
        send(number)
        assert run_signals.requested is number
        with pytest.raises(error):
            run_signals.check()


def test_a_second_ctrl_c_interrupts_at_once() -> None:
    with RunSignals():
        send(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)


def test_handlers_are_given_back() -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with RunSignals():
        assert signal.getsignal(signal.SIGINT) != before[0]
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_a_handler_of_the_user_stays() -> None:
    def mine(number: int, frame: object) -> None: ...

    before = signal.signal(signal.SIGINT, mine)
    try:
        with RunSignals() as run_signals:
            assert signal.getsignal(signal.SIGINT) is mine
            assert run_signals.handled == {signal.SIGTERM}
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_handler_of_sigterm_is_called_and_the_run_ends() -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    mine = signal.getsignal(signal.SIGTERM)
    try:
        with RunSignals() as run_signals:
            with RunSignals() as inner:  # a run within a run leaves it to the outer one
                assert inner.handled == set()
            send(signal.SIGTERM)
            assert heard == [signal.SIGTERM]
            with pytest.raises(StopBySignal):
                run_signals.check()
        assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, before)


class Two:
    """Two ranks in this process; the first has the run_signals."""

    def __init__(self) -> None:
        store = dist.HashStore()
        self.watches = [Watch(store, rank=rank, size=2) for rank in range(2)]
        for watch in self.watches:
            watch.start()
        self.watches[1].begin_run()

    def __enter__(self) -> list[Watch]:
        return self.watches

    def __exit__(self, *_: object) -> None:
        self.watches[1].end_run()
        self.watches[1].stop()
        self.watches[0].stop()


def test_a_signal_at_one_rank_stops_both() -> None:
    with Two() as (watch, other), RunSignals() as run_signals:
        run_signals.connect(watch)
        assert run_signals.stop_coordinator is watch.stop_coordinator
        assert run_signals.stop_coordinator.begin()
        send(signal.SIGTERM)
        wait_until(lambda: other.stop_coordinator.reason is not None)
        assert other.stop_coordinator.begin()  # it has not begun the phase that the first is in
        assert not other.stop_coordinator.begin()
        assert not run_signals.stop_coordinator.begin()
        assert isinstance(run_signals.stop_error(), StopBySignal)
        with pytest.raises(StopBySignal):
            run_signals.stop()


def test_a_signal_after_the_last_segment_stops_the_next_run() -> None:
    with Two() as (watch, other):
        with RunSignals() as run_signals:
            run_signals.connect(watch)
            send(signal.SIGINT)
        wait_until(lambda: other.stop_coordinator.reason is not None)
        with RunSignals() as run_signals:
            run_signals.connect(watch)
            assert run_signals.stop_coordinator is not None
            assert not run_signals.stop_coordinator.begin()
            with pytest.raises(KeyboardInterrupt):
                run_signals.stop()


def test_signals_reach_the_watch_and_the_pipe_is_given_back() -> None:
    with Two() as (watch, other):
        with RunSignals() as run_signals:
            run_signals.connect(watch)
            fd = signal.set_wakeup_fd(-1)
            assert fd == watch.signal_pipe
            signal.set_wakeup_fd(fd, warn_on_full_buffer=False)
        assert signal.set_wakeup_fd(-1) == -1
        assert other.stop_coordinator.reason is None


def test_ctrl_c_in_a_forked_loader_worker_is_not_taken_for_a_second_one() -> None:
    with Two() as (watch, _), RunSignals() as run_signals:
        run_signals.connect(watch)
        child = os.fork()
        if child == 0:
            is_silent = signal.set_wakeup_fd(-1) == -1
            os._exit(0 if is_silent else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert run_signals.requested is None


def test_an_event_loops_pipe_is_left_alone() -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing)
    try:
        with Two() as (watch, _), RunSignals() as run_signals:
            run_signals.connect(watch)
            assert signal.set_wakeup_fd(writing) == writing
    finally:
        assert signal.set_wakeup_fd(-1) == writing
        os.close(reading)
        os.close(writing)
