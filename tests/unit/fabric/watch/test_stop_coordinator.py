"""The agreement on where to stop, under many interleavings of threads that stand for ranks."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from loopwright.errors import RankFailure
from loopwright.fabric.watch import StopCoordinator


def coordinators(size: int, timeout_s: float = 30.0) -> list[StopCoordinator]:
    store = dist.HashStore() if size > 1 else None
    return [StopCoordinator(store, rank=rank, size=size, timeout_s=timeout_s) for rank in range(size)]


def poll_all(group: list[StopCoordinator], times: int = 4) -> None:
    for _ in range(times):
        for coordinator in group:
            coordinator.poll()


# --- one rank, and by hand --------------------------------------------------------------------------------------------


def test_one_rank_stops_at_once() -> None:
    (coordinator,) = coordinators(1)
    assert coordinator.begin()
    coordinator.request("SIGTERM")
    assert not coordinator.begin()
    assert coordinator.reason == "SIGTERM"
    assert coordinator.position == (1, 0)


def test_without_a_request_nothing_is_said() -> None:
    group = coordinators(2)
    for coordinator in group:
        assert all(coordinator.begin() and coordinator.within() and coordinator.end() for _ in range(5))
    poll_all(group)
    assert not any(coordinator.is_under_way or coordinator.has_stopped for coordinator in group)


def test_all_stop_after_the_segment_of_the_one_that_is_furthest() -> None:
    group = coordinators(3)
    for coordinator, phases in zip(group, (4, 6, 5), strict=True):
        assert all(coordinator.begin() for _ in range(phases))
    group[0].request("SIGTERM")
    poll_all(group)
    assert [[coordinator.begin() for _ in range(3)] for coordinator in group] == [
        [True, True, False], [False, False, False], [True, False, False],
    ]  # fmt: skip
    assert [coordinator.position for coordinator in group] == [(6, 0)] * 3
    assert [coordinator.reason for coordinator in group] == ["SIGTERM"] * 3


def test_a_request_of_all_at_one_boundary_adds_no_step() -> None:
    group = coordinators(3)
    for coordinator in group:
        coordinator.begin()
        coordinator.request("should_stop")
    poll_all(group)
    assert [coordinator.begin() for coordinator in group] == [False] * 3
    assert [coordinator.position for coordinator in group] == [(1, 0)] * 3


@pytest.mark.parametrize(
    ("wishes", "reason"),
    [
        (["should_stop", "SIGTERM"], "SIGTERM"),
        (["SIGTERM", "SIGINT"], "SIGTERM"),
        (["SIGINT", "should_stop"], "SIGINT"),
        (["SIGUSR1", "should_stop"], "SIGUSR1"),
    ],
)
def test_the_strongest_reason_holds_on_all_ranks(wishes: list[str], reason: str) -> None:
    group = coordinators(2)
    for coordinator, wish in zip(group, wishes, strict=True):
        coordinator.begin()
        coordinator.request(wish)
    poll_all(group)
    assert [coordinator.begin() for coordinator in group] == [False, False]
    assert [coordinator.reason for coordinator in group] == [reason] * 2


def test_a_gate_is_used_again_after_reset() -> None:
    group = coordinators(2)
    for _ in range(3):
        for coordinator in group:
            coordinator.reset()
            assert coordinator.begin()
        group[1].request("should_stop")
        poll_all(group)
        assert [coordinator.begin() for coordinator in group] == [False, False]
        assert [coordinator.reason for coordinator in group] == ["should_stop"] * 2
    assert [coordinator.position for coordinator in group] == [(3, 0)] * 2


def test_a_request_that_came_before_this_rank_was_reset_is_heard_after_it() -> None:
    group = coordinators(2)
    for coordinator in group:
        assert coordinator.begin()
        coordinator.request("failed save")
    poll_all(group)
    assert [coordinator.begin() for coordinator in group] == [False, False]
    group[0].reset()
    assert group[0].begin()
    group[0].request("SIGTERM")
    group[0].poll()
    group[1].poll()  # because rank 0 rang; it rings once
    group[1].reset()
    for _ in range(4):  # from now on as a watch does it: who was not rung for polls only where the coordinator needs it
        for coordinator in group:
            if coordinator.needs_poll:
                coordinator.poll()
    assert group[1].begin()  # as far as rank 0 had come
    assert [coordinator.begin() for coordinator in group] == [False, False]
    assert [coordinator.reason for coordinator in group] == ["SIGTERM"] * 2


def test_reset_of_a_gate_that_did_not_stop_changes_nothing() -> None:
    group = coordinators(2)
    for coordinator in group:
        coordinator.begin()
    group[0].request("SIGTERM")
    poll_all(group)  # agreed on, but the run ended here anyway
    for coordinator in group:
        coordinator.reset()
    assert [coordinator.begin() for coordinator in group] == [False, False]


def test_a_signal_that_came_too_late_for_one_stop_makes_the_next() -> None:
    group = coordinators(2)
    for coordinator in group:
        coordinator.begin()
        coordinator.request("should_stop")
    poll_all(group)
    group[1].request("SIGTERM")
    assert [coordinator.begin() for coordinator in group] == [False, False]
    for coordinator in group:
        coordinator.reset()
    poll_all(group)
    assert [coordinator.begin() for coordinator in group] == [False, False]
    assert [coordinator.reason for coordinator in group] == ["SIGTERM"] * 2


def test_a_signal_that_was_answered_is_not_made_again() -> None:
    group = coordinators(2)
    group[0].request("SIGINT")
    group[1].request("SIGINT")
    poll_all(group)
    for coordinator in group:
        assert not coordinator.begin()
        coordinator.reset()
    poll_all(group)
    assert [coordinator.begin() for coordinator in group] == [True, True]


def test_ranks_with_fewer_batches_stop_in_front_of_the_end() -> None:
    group = coordinators(2)
    assert all(coordinator.begin() for coordinator in group)
    assert group[0].within()
    assert group[0].within()
    assert group[0].within()
    assert group[1].within()
    group[1].request("SIGTERM")
    poll_all(group)
    assert not group[0].within()
    assert group[1].within()
    assert not group[1].end()  # it has only two batches, the other rank three


def test_a_rank_that_ended_the_evaluation_takes_the_others_with_it() -> None:
    group = coordinators(2)
    for coordinator in group:
        assert coordinator.begin()
        assert coordinator.within()
    assert group[0].end()
    group[1].request("SIGTERM")
    poll_all(group)
    assert group[1].within()
    assert group[1].end()
    assert [coordinator.begin() for coordinator in group] == [False, False]


def test_a_rank_that_ended_is_not_waited_for() -> None:
    group = coordinators(2)
    assert group[0].begin()
    group[1].close()
    poll_all(group[:1])
    assert group[0].begin()  # an ack alone asks for nothing
    group[0].request("SIGTERM")
    poll_all(group[:1])
    assert not group[0].begin()


def test_a_failure_ends_the_waiting() -> None:
    group = coordinators(2)
    group[0].request("SIGTERM")
    threading.Timer(0.05, group[0].fail, [RankFailure("rank 1 failed.", fix="look there.")]).start()
    with pytest.raises(RankFailure, match="rank 1 failed"):
        group[0].begin()
    group[0].revive()
    poll_all(group)
    assert [coordinator.begin() for coordinator in group] == [False, False]


def test_a_gate_that_failed_and_was_revived_lets_go_on() -> None:
    group = coordinators(2)
    group[0].fail(RankFailure("rank 1 failed.", fix="look there."))
    group[0].revive()
    assert group[0].begin()


def test_ranks_that_do_not_answer_are_named() -> None:
    group = coordinators(3, timeout_s=0.2)
    for coordinator in (group[1], group[0]):
        coordinator.request("SIGTERM")
        coordinator.poll()
    is_over = threading.Event()

    def poll() -> None:
        while not is_over.wait(0.05):
            group[0].poll()

    polling = threading.Thread(target=poll)
    polling.start()
    with pytest.raises(RankFailure, match="missing: 2"):
        group[0].begin()
    is_over.set()
    polling.join()


# --- every order of events --------------------------------------------------------------------------------------------


def program(rng: random.Random, size: int) -> list[list[int] | None]:
    """Return phases that all ranks go through: None for a step, batches of each rank for an evaluation."""
    return [
        [rng.randrange(4) for _ in range(size)] if rng.random() < 0.3 else None for _ in range(rng.randrange(2, 12))
    ]


def walk(phases: list[list[int] | None], rank: int) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield what a rank asks for, and the position that it is then at."""
    for number, batches in enumerate(phases, 1):
        yield "begin", (number, 0)
        if batches is not None:
            yield from (("within", (number, batch)) for batch in range(1, batches[rank] + 1))
            yield "end", (number, 2**32 - 1)


def at_or_before(phases: list[list[int] | None], rank: int, cut: tuple[int, int]) -> tuple[int, int]:
    """Return the last position of a rank that is not past the cut."""
    return max([(0, 0), *(position for _, position in walk(phases, rank) if position <= cut)])


@pytest.mark.parametrize("block", range(8))
def test_any_order_of_moves_requests_and_polls_ends_at_one_stop_step(block: int) -> None:
    for seed in range(block * 250, block * 250 + 250):
        rng = random.Random(seed)
        size = rng.randrange(2, 5)
        phases, group = program(rng, size), coordinators(size)
        todo = [walk(phases, rank) for rank in range(size)]
        following = [next(steps, None) for steps in todo]
        reached = [(0, 0)] * size
        furthest_at_request: tuple[int, int] | None = None
        for _ in range(400):
            rank = rng.randrange(size)
            coordinator = group[rank]
            what = rng.random()
            if what < 0.03:
                if furthest_at_request is None:
                    furthest_at_request = max(reached)
                coordinator.request(rng.choice(["SIGTERM", "SIGINT", "should_stop"]))
            elif what < 0.35:
                coordinator.poll()
            elif (move := following[rank]) is not None:
                phase, batch = move[1]
                with coordinator._lock:
                    verdict = coordinator._decide(phase, batch)
                if verdict:
                    reached[rank] = move[1]
                    assert coordinator.position == move[1]
                    following[rank] = next(todo[rank], None)
        asked = furthest_at_request is not None
        poll_all(group, times=5)
        for rank, coordinator in enumerate(group):
            while following[rank] is not None:
                kind, position = following[rank]  # type: ignore[misc]
                if not getattr(coordinator, kind)():
                    break
                reached[rank] = position
                following[rank] = next(todo[rank], None)
        if not asked:
            assert all(step is None for step in following)
            continue
        stop_steps = {coordinator._stop_step for coordinator in group}
        assert len(stop_steps) == 1, seed
        assert len({coordinator.reason for coordinator in group}) == 1
        number = stop_steps.pop()
        assert number is not None
        cut = (number >> 32, number & (2**32 - 1))
        assert furthest_at_request is not None
        assert cut >= furthest_at_request  # never back before what was done
        assert reached == [at_or_before(phases, rank, cut) for rank in range(size)], seed


class Rank(threading.Thread):
    """A rank: its main thread is this one; a second one polls. Barriers stand for collectives."""

    def __init__(
        self, coordinator: StopCoordinator, rank: int, phases: list[list[int] | None], all_here: threading.Barrier
    ) -> None:
        super().__init__(daemon=True)
        self.stop_coordinator, self.rank, self.phases, self.all_here = coordinator, rank, phases, all_here
        self.rng = random.Random(rank * 7919 + len(phases))
        self.ends_at: tuple[str, int] | None = None
        self.problem: BaseException | None = None
        self.wants_at: int | None = None
        self.is_over = threading.Event()
        coordinator.wake = (ringing := threading.Event()).set
        self.ringing = ringing

    def poll(self) -> None:
        while not self.is_over.is_set():
            self.stop_coordinator.poll()
            self.ringing.wait(self.rng.random() * 0.002)
            self.ringing.clear()

    def run(self) -> None:
        try:
            self.ends_at = self.go()
        except BaseException as error:
            self.problem = error
            self.all_here.abort()

    def collective(self) -> None:
        self.all_here.wait(timeout=120)

    def go(self) -> tuple[str, int]:
        for number, batches in enumerate(self.phases, 1):
            if self.wants_at == number:
                self.stop_coordinator.request("should_stop")
            if not self.stop_coordinator.begin():
                return "begin", number
            if batches is None:
                self.collective()
                continue
            for _ in range(batches[self.rank]):
                if not self.stop_coordinator.within():
                    return "evaluation", number
            if not self.stop_coordinator.end():
                return "evaluation", number
            self.collective()
        return "over", 0


@pytest.mark.parametrize("seed", range(40))
def test_threads_with_collectives_never_hang_and_stop_together(seed: int) -> None:
    rng = random.Random(seed)
    size = rng.randrange(2, 5)
    phases: list[list[int] | None] = [
        [rng.randrange(5) for _ in range(size)] if rng.random() < 0.3 else None for _ in range(60)
    ]
    group, barrier = coordinators(size), threading.Barrier(size)
    ranks = [Rank(coordinator, rank, phases, barrier) for rank, coordinator in enumerate(group)]
    if seed % 2:
        at = rng.randrange(1, 60)
        for rank in ranks:
            rank.wants_at = at if seed % 4 == 1 or rank.rank == 0 else None
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    polls = [threading.Thread(target=rank.poll, daemon=True) for rank in ranks]
    try:
        for thread in [*ranks, *polls]:
            thread.start()
        if not seed % 2:
            threading.Event().wait(rng.random() * 0.01)
            group[rng.randrange(size)].request("SIGTERM")
        for rank in ranks:
            rank.join(60)
    finally:
        sys.setswitchinterval(interval)
        for rank in ranks:
            rank.is_over.set()
    assert [rank.problem for rank in ranks] == [None] * size
    assert len({rank.ends_at for rank in ranks}) == 1
    if seed % 4 == 1:
        assert ranks[0].ends_at == ("begin", at)  # all asked at this boundary: not one more
