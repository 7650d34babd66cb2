"""What raises for a dead loader worker while an error is looked at becomes a note of that error."""

from __future__ import annotations

import os
import signal

import pytest

from loopwright.fabric.child_signals import note_dead_worker, without_child_signals


def test_a_death_that_comes_before_it_is_held_off_is_a_note_and_one_after_it_is_not_raised() -> None:
    def handler(number: int, frame: object) -> None:
        raise RuntimeError("DataLoader worker (pid 1) is killed by signal: Segmentation fault.")

    real, error = signal.getsignal, ConnectionResetError("reset by peer")
    calls: list[int] = []

    def once_with_a_signal(number: int) -> object:
        calls.append(number)
        if len(calls) == 1:
            os.kill(os.getpid(), signal.SIGCHLD)
        return real(number)

    earlier = signal.signal(signal.SIGCHLD, handler)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(signal, "getsignal", once_with_a_signal)
            with without_child_signals(error):
                os.kill(os.getpid(), signal.SIGCHLD)
                assert note_dead_worker(error)
        assert real(signal.SIGCHLD) is handler
    finally:
        signal.signal(signal.SIGCHLD, earlier)
    assert error.__notes__ == ["DataLoader worker (pid 1) is killed by signal: Segmentation fault."]
    assert len(calls) == 2


def test_an_error_without_a_dead_worker_gets_no_note() -> None:
    error = ConnectionResetError("reset by peer")
    with without_child_signals(error):
        assert not note_dead_worker(error)
    assert not hasattr(error, "__notes__")
