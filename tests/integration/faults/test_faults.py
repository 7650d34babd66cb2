"""One rank fails in every way there is: it is named on all ranks, and all end within seconds."""

from __future__ import annotations

import ctypes
import os
import random
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from broken_ranks import Ended, Ranks, train

from loopwright.errors import RankFailure


def hang() -> None:
    time.sleep(600)


class Loader:
    """A rank's data loader that never gives its next batch."""

    def next_batch(self) -> None:
        hang()


def all_end(ended: list[Ended]) -> None:
    """Expect that each rank ended by itself. Collectives would wait for an hour, and tests wait for minutes."""
    report = "\n".join(f"== rank {rank}: {one}\n{one.said}" for rank, one in enumerate(ended))
    assert all(one.code is not None for one in ended), report
    assert all(one.code != 0 for one in ended), report


def raises(rank: int, step: int) -> None:
    if (rank, step) == (1, 5):
        raise ValueError("a bad sample")


def test_an_exception_reaches_every_rank_with_its_traceback() -> None:
    ended = Ranks(train, 3, raises).wait()
    all_end(ended)
    for one in ended:
        assert "ValueError: a bad sample" in one.said
        assert "in raises" in one.said  # the line of the user's code
    for one in (ended[0], ended[2]):
        assert "rank 1" in one.said
        assert "hook training_step, epoch 0, step 5" in one.said
        assert "RankFailure" in one.said


def test_kill_9_is_seen_at_once() -> None:
    def fault(rank: int, step: int) -> None:
        if (rank, step) == (1, 5):
            os.kill(os.getpid(), signal.SIGKILL)

    ended = Ranks(train, 3, fault).wait()
    all_end(ended)
    assert ended[1].code == -signal.SIGKILL
    for one in (ended[0], ended[2]):
        assert "rank 1" in one.said
        assert "without a report" in one.said


@pytest.mark.parametrize("code", [0, 3])
def test_os_exit_is_a_failure_whatever_its_code(code: int) -> None:
    def fault(rank: int, step: int) -> None:
        if (rank, step) == (2, 5):
            os._exit(code)

    ended = Ranks(train, 3, fault).wait()
    for one in ended[:2]:
        assert one.code == 1
        assert "rank 2" in one.said


def test_a_rank_that_dies_in_its_first_step_is_named() -> None:
    def fault(rank: int, step: int) -> None:
        if rank == 1:
            os._exit(9)

    for _ in range(3):  # it was a matter of milliseconds once
        ended = Ranks(train, 2, fault).wait()
        assert "rank 1" in ended[0].said, ended[0].said


def test_a_dead_rank_is_noticed_by_one_that_does_not_communicate() -> None:
    def fault(rank: int, step: int) -> None:
        if step == 5:
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            hang()

    ended = Ranks(train, 2, fault).wait()
    all_end(ended)
    assert "Loopwright: rank 0 ends because rank 1" in ended[0].said


def test_an_exception_ends_a_rank_that_is_stuck_in_its_loader() -> None:
    def fault(rank: int, step: int) -> None:
        if step == 5:
            if rank == 1:
                raise ValueError("a bad sample")
            Loader().next_batch()

    ended = Ranks(train, 2, fault).wait()
    all_end(ended)
    assert "ValueError: a bad sample" in ended[0].said


@pytest.mark.slow
def test_the_rank_that_hangs_in_its_loader_is_named_after_the_time_out() -> None:
    def fault(rank: int, step: int) -> None:
        if (rank, step) == (1, 5):
            Loader().next_batch()

    ended = Ranks(train, 3, fault, timeout_s=3).wait()
    all_end(ended)
    for one in ended:
        assert "rank 1 did not come to all_reduce #6" in one.said
    assert "in next_batch" in ended[0].said


def test_a_skipped_collective_shows_what_each_rank_called() -> None:
    def fault(rank: int, step: int) -> None:
        if (rank, step) == (1, 5):
            dist.barrier()
            hang()

    ended = Ranks(train, 2, fault, timeout_s=3).wait()
    all_end(ended)
    assert "barrier" in ended[0].said + ended[1].said


def test_a_collective_too_many_names_the_ranks_that_ended() -> None:
    def after(rank: int, size: int) -> None:
        if rank == 0:
            dist.barrier()

    ended = Ranks(train, 2, lambda rank, step: None, after=after).wait()
    assert ended[0].code != 0
    assert ended[1].code == 0


def wait_in_c(seconds: int) -> None:
    """Keep the interpreter's lock for some seconds; unlike `sleep`, this is not ended by the signal that asks where."""
    libc = ctypes.PyDLL(None)
    mutex = ctypes.create_string_buffer(64)  # zeros are an unlocked mutex
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_timedlock(mutex, (ctypes.c_long * 2)(int(time.time()) + seconds, 0))


@pytest.mark.slow
def test_c_code_that_keeps_python_from_running_is_named() -> None:
    def fault(rank: int, step: int) -> None:
        if (rank, step) == (1, 5):
            wait_in_c(12)

    ended = Ranks(train, 2, fault, timeout_s=4, stall_s=2).wait()
    all_end(ended)
    assert "rank 1" in ended[0].said
    assert "blocks Python" in ended[0].said
    assert "in wait_in_c" in ended[0].said  # its stack, though it holds the interpreter


@pytest.mark.slow
def test_a_stopped_process_is_named() -> None:
    def fault(rank: int, step: int) -> None:
        if (rank, step) == (1, 5):
            os.kill(os.getpid(), signal.SIGSTOP)

    ranks = Ranks(train, 2, fault, timeout_s=4, stall_s=2)
    ended = ranks.wait(ranks={0})
    assert ended[0].code == 1
    assert "is stopped (SIGSTOP" in ended[0].said


def test_a_stall_after_a_rank_has_ended_is_not_blamed_on_that_rank() -> None:
    def after(rank: int, size: int) -> None:
        pair = dist.new_group([1, 2])
        for step in range(2 * rank):  # nothing on rank 0, which ends
            if (rank, step) == (2, 1):
                hang()
            dist.all_reduce(torch.ones(1), group=pair)

    ranks = Ranks(train, 3, lambda rank, step: None, steps=2, stall_s=1.5, after=after)
    try:
        ranks.line(1, "no progress for")
        ranks.line(1, "did not come to all_reduce")
    finally:
        said = ranks.wait(timeout_s=0)[1].said
    assert "rank 2 did not come to all_reduce" in said
    assert "rank 0: has ended normally" in said


def test_a_stall_makes_one_report_and_ends_nothing() -> None:
    def fault(rank: int, step: int) -> None:
        if (rank, step) == (1, 5):
            time.sleep(4)

    ended = Ranks(train, 3, fault, stall_s=1.5).wait()
    assert [one.code for one in ended] == [0, 0, 0], ended
    assert "no progress for" in ended[0].said
    assert "rank 1 did not come to all_reduce #6 ([3] Float), where ranks 0, 2 wait" in ended[0].said
    assert "in fault" in ended[0].said
    assert not ended[1].said
    assert not ended[2].said


@pytest.mark.slow
def test_an_error_that_all_ranks_have_is_theirs_to_handle() -> None:
    def program(rank: int, size: int, store: Any) -> None:
        from datetime import timedelta

        from loopwright.fabric.watch import Watch

        timeout = timedelta(seconds=20)
        group = dist.PrefixStore("pg", store)
        dist.init_process_group("gloo", store=group, rank=rank, world_size=size, timeout=timeout)
        watch = Watch(store, rank=rank, size=size, local_rank=rank)
        watch.start()
        for number in range(3):
            watch.begin_run()
            try:
                raise ArithmeticError(f"NaN in run {number}")
            except ArithmeticError as error:
                if watch.explain(error) is None:
                    watch.report(error)
            finally:
                watch.end_run()
            time.sleep(0.4 * rank)  # the others see the failure before this rank goes on
        watch.begin_run()
        dist.all_reduce(torch.ones(1))
        time.sleep(4)  # longer than the grace
        watch.end_run()
        watch.stop()

    assert [one.code for one in Ranks(program, 3).wait()] == [0, 0, 0]


def test_ranks_that_end_one_after_the_other_are_no_failure() -> None:
    def after(rank: int, size: int) -> None:
        time.sleep(0.7 * rank)

    ended = Ranks(train, 3, lambda rank, step: None, after=after).wait()
    assert [one.code for one in ended] == [0, 0, 0]
    assert not any(one.said for one in ended)


def test_the_store_that_vanishes_is_a_failure_of_its_host() -> None:
    def fault(rank: int, step: int) -> None:
        if step == 5:
            hang()

    ranks = Ranks(train, 2, fault)
    time.sleep(1.5)
    ranks.store = None  # type: ignore[assignment]  # the server ends with the object
    ended = ranks.wait()
    all_end(ended)
    assert "the store does not answer" in ended[0].said


@pytest.mark.parametrize("lost", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_host_that_falls_silent_is_named(lost: int) -> None:
    def fault(rank: int, step: int) -> None:
        if step == 5:
            if rank == lost:
                os.kill(os.getpid(), signal.SIGSTOP)  # a lost host sends nothing, and nothing else is known of it
            hang()

    def program(rank: int, size: int, store: Any) -> None:
        from loopwright.fabric.watch import peers

        peers.machine_key = lambda: f"machine of rank {rank}"
        train(rank, size, store, fault, stall_s=2)

    ranks = Ranks(program, 2)
    other = 1 - lost
    ranks.line(other, "has not answered for 2 s")
    ended = ranks.wait(ranks={other})
    assert ended[other].code == 1
    assert f"rank {other} ends because rank {lost}" in ended[other].said


@pytest.mark.parametrize("seed", range(4))
def test_a_fault_of_any_kind_at_any_moment_ends_all(seed: int) -> None:
    rng = random.Random(seed)
    size, culprit, at = rng.choice([2, 3]), rng.randrange(2), rng.randrange(30)
    kind = rng.choice(["raise", "kill", "exit", "sys.exit"])

    def fault(rank: int, step: int) -> None:
        if (rank, step) == (culprit, at):
            if kind == "raise":
                raise ValueError("a bad sample")
            if kind == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if kind == "exit":
                os._exit(9)
            raise SystemExit(5)

    ended = Ranks(train, size, fault).wait()
    all_end(ended)
    for rank, one in enumerate(ended):
        assert rank == culprit or f"rank {culprit} (host" in one.said, (kind, one)


def test_a_rank_failure_cannot_be_ignored() -> None:
    def program(rank: int, size: int, store: Any) -> None:
        try:
            train(rank, size, store, raises)
        except RankFailure:
            pass
        except ValueError:
            raise SystemExit(7) from None

    ended = Ranks(program, 2).wait()
    assert [one.code for one in ended] == [0, 7]
