"""Watches as threads of one process, on a store in memory: who is blamed, what is settled, what is explained."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist

from loopwright.errors import RankFailure, StopBySignal
from loopwright.fabric.failure import Failure
from loopwright.fabric.watch import Watch
from loopwright.fabric.watch.errors import is_communication_error, is_timeout
from loopwright.fabric.watch.failure_store import FailureRecord, FailureStore

GLOO = RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:3")


class Group:
    """Watches of several ranks; what would end a process is noted instead."""

    def __init__(self, size: int, **options: Any) -> None:
        store = dist.HashStore()
        self.exits: dict[int, int] = {}
        self.watches = [Watch(store, rank=rank, size=size, **options) for rank in range(size)]
        for rank, watch in enumerate(self.watches):
            watch._exit = lambda code, rank=rank: self.exits.setdefault(rank, code)  # type: ignore[misc]
            watch.start()
            watch.begin_run()

    def __getitem__(self, rank: int) -> Watch:
        return self.watches[rank]

    def stop(self) -> None:
        threads = [threading.Thread(target=watch.stop) for watch in self.watches]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


@pytest.fixture
def ranks() -> Iterator[Any]:
    groups: list[Group] = []

    def make(size: int, **options: Any) -> Group:
        groups.append(Group(size, **options))
        return groups[-1]

    yield make
    for group in groups:
        group.stop()


def error_of(text: str) -> ValueError:
    try:
        raise ValueError(text)
    except ValueError as error:
        return error


def test_one_rank_watches_nobody() -> None:
    watch = Watch(dist.HashStore(), rank=0, size=1)
    watch.start()
    assert watch._thread is None
    assert watch.explain(GLOO) is None
    watch.report(error_of("x"))
    watch.stop()


def test_a_report_reaches_the_others_with_place_and_traceback(ranks: Any) -> None:
    group = ranks(3)
    group[1].describe = lambda: {"hook": "training_step", "step": 12}
    group[1].report(error_of("bad sample"))
    for rank in (0, 2):
        failure = group[rank].first_failure(5.0)
        assert failure is not None
        assert failure.rank == 1
        assert failure.place == {"hook": "training_step", "step": 12}
        assert "in error_of" in failure.trace


def test_an_error_of_communication_is_explained_by_the_failure_behind_it(ranks: Any) -> None:
    group = ranks(2)
    threading.Timer(0.3, group[1].report, [error_of("bad sample")]).start()
    explained = group[0].explain(GLOO)
    assert isinstance(explained, RankFailure)
    assert "bad sample" in str(explained)
    group[0].report(explained)  # adds nothing
    assert group[0].first_failure().rank == 1


def test_other_errors_are_ones_own(ranks: Any) -> None:
    group = ranks(2)
    assert group[0].explain(error_of("mine")) is None
    assert group[0].explain(RankFailure("rank 1.", fix="look.")) is None


@pytest.mark.parametrize("seed", range(5))
def test_all_ranks_see_the_same_first_failure(ranks: Any, seed: int) -> None:
    rng = random.Random(seed)
    group = ranks(4)
    delays = [rng.random() * 0.05 for _ in range(3)]

    def fail(rank: int) -> None:
        time.sleep(delays[rank])
        group[rank].report(error_of(f"error of {rank}"))

    threads = [threading.Thread(target=fail, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seen = {group[rank].first_failure(5.0).how for rank in range(4)}
    assert len(seen) == 1, seen


def test_a_main_thread_that_does_not_take_notice_is_ended(ranks: Any, capfd: pytest.CaptureFixture[str]) -> None:
    group = ranks(2)
    group[1].report(error_of("bad sample"))
    ends = time.monotonic() + 120
    while not group.exits and time.monotonic() < ends:
        time.sleep(0.05)
    assert group.exits == {0: 1}
    said = capfd.readouterr().err
    assert "rank 0 ends because rank 1" in said
    assert "bad sample" in said


def test_the_gate_gives_the_failure_to_whoever_waits(ranks: Any) -> None:
    group = ranks(2)
    group[1].stop_coordinator._has_posted = group[1].stop_coordinator._is_requested = True  # it never answers
    group[0].stop_coordinator.request("SIGTERM")
    threading.Timer(0.1, group[1].report, [error_of("bad sample")]).start()
    with pytest.raises(RankFailure, match="bad sample"):
        group[0].stop_coordinator.begin()
    group[0].report(RankFailure("rank 1.", fix="look."))  # what the trainer does; then it is out of the run
    group[0].end_run()


def test_agreed_stops_are_no_failures(ranks: Any) -> None:
    group = ranks(2)
    group[0].stop_coordinator.request("SIGTERM")
    for watch in group.watches:
        assert not watch.stop_coordinator.begin()
        watch.report(StopBySignal())
    assert group[1].first_failure(0.6) is None


def test_what_all_ranks_have_alike_is_settled(ranks: Any) -> None:
    group = ranks(3)
    for _ in range(4):
        for watch in group.watches:
            error = error_of("NaN")
            assert watch.explain(error) is None
            watch.report(error)
            watch.end_run()
        for watch in group.watches:
            watch.begin_run()
            assert watch.first_failure() is None
            assert watch.stop_coordinator.begin()
    group[2].report(error_of("for good"))
    assert "for good" in group[0].first_failure(5.0).how


def test_a_late_report_of_a_settled_run_is_settled_too(ranks: Any) -> None:
    group = ranks(2)
    group[0].report(error_of("NaN"))
    group[0].end_run()
    group[0].begin_run()
    group[1].report(error_of("NaN"))
    time.sleep(0.6)
    assert group[0].first_failure() is None
    group[1].end_run()


def test_a_rank_that_ignored_a_failure_cannot_begin_again(ranks: Any) -> None:
    group = ranks(2)
    group[1].report(error_of("bad sample"))
    assert group[0].explain(GLOO) is not None
    group[0].end_run()
    with pytest.raises(RankFailure, match="bad sample"):
        group[0].begin_run()


def test_ranks_that_ended_regularly_are_named(ranks: Any) -> None:
    group = ranks(2)
    group[1].stop()
    explained = group[0].explain(GLOO)
    assert "rank 1 ended normally" in str(explained)


def test_uncaught_exceptions_are_posted(ranks: Any) -> None:
    group = ranks(2)
    heard = []
    group[1]._earlier_hook = lambda *error: heard.append(error)
    error = error_of("between two runs")
    group[1]._on_uncaught(ValueError, error, error.__traceback__)
    assert "between two runs" in group[0].first_failure(5.0).how
    assert heard[0][1] is error
    group[0].report(RankFailure("rank 1.", fix="look."))
    group[0].end_run()


@pytest.mark.parametrize(
    ("error", "is_communication", "is_late"),
    [
        (GLOO, True, False),
        (RuntimeError("[...unbound_buffer.cc:78] Timed out waiting 3000ms for recv operation to complete"), True, True),
        (RuntimeError("gloo: Connection reset by peer"), True, False),
        (ConnectionResetError("Connection reset by peer"), False, False),  # the user's own socket
        (RuntimeError("shape mismatch"), False, False),
        (ValueError("Timed out waiting for a file"), False, False),
    ],
)
def test_which_errors_another_rank_may_have_caused(error: Exception, is_communication: bool, is_late: bool) -> None:
    assert is_communication_error(error) == is_communication
    assert is_timeout(error) == is_late


def test_an_error_raised_from_one_of_communication_is_one() -> None:
    outer = RuntimeError("saving failed")
    outer.__cause__ = GLOO
    assert is_communication_error(outer)


# --- the failure store ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(10))
def test_failures_are_in_one_order_for_all(seed: int) -> None:
    rng = random.Random(seed)
    store = dist.HashStore()
    stores = [FailureStore(store, rank=rank, size=4) for rank in range(4)]
    start = threading.Barrier(4)

    def write(rank: int) -> None:
        start.wait()
        for run in sorted(rng.sample(range(5), 3)):
            stores[rank].write_failure(FailureRecord(run, rank, Failure(rank, "h", 1, f"{run} by {rank}")))

    threads = [threading.Thread(target=write, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seen = [[record.failure.how for record in FailureStore(store, rank=9, size=4).new_failures()] for _ in range(2)]
    assert seen[0] == seen[1]
    runs = [int(how.split()[0]) for how in seen[0]]
    assert runs == sorted(set(runs))  # one for each run at most


def test_the_notification_is_received_once() -> None:
    store = dist.HashStore()
    one, other = FailureStore(store, rank=0, size=2), FailureStore(store, rank=1, size=2)
    one.notify()
    assert other.was_notified()
    assert not other.was_notified()


def test_two_status_requests_in_one_notification_are_both_reported(
    ranks: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    group = ranks(2)
    failure_store = group[0]._failure_store

    def ask_twice() -> None:
        for number, why in enumerate(("the first reason", "the second reason")):
            failure_store.store.set(f"stall/{number}", json.dumps([1, why]))
        failure_store.notify()

    group[0]._run_on_thread(ask_twice, wait_s=5.0)
    ends = time.monotonic() + 120
    while "the second reason" not in group[0].last_stall_report and time.monotonic() < ends:
        time.sleep(0.02)
    said = capfd.readouterr().err
    assert said.count("the first reason") == said.count("the second reason") == 1
