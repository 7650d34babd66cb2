"""Ranks that the others waited for: named with their phase where they are late, and none by chance."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest

from loopwright.trainer.timeline.stragglers import RankTimes, Straggler, find_stragglers

PHASES = {"data": 0.002, "forward": 0.010, "backward": 0.020, "optimizer": 0.003}


def ranks_of(
    size: int, steps: int, late: Callable[[int, int], dict[str, float]], seed: int = 0, noise: float = 0.02
) -> list[RankTimes]:
    """Return the times of ranks that wait for the last one in each step; `late(rank, step)` is added to its phases."""
    rng = random.Random(seed)
    found: list[dict[int, dict[str, float]]] = [{} for _ in range(size)]
    for step in range(steps):
        busy = []
        for rank in range(size):
            more = late(rank, step)
            busy.append({phase: taken * (1 + abs(rng.gauss(0, noise))) + more.get(phase, 0.0)
                         for phase, taken in PHASES.items()})  # fmt: skip
        slowest = max(sum(one.values()) for one in busy)
        for rank, one in enumerate(busy):
            found[rank][step] = {**one, "communication": slowest - sum(one.values()) + 0.001}
    return [RankTimes(one) for one in found]


def never(rank: int, step: int) -> dict[str, float]:
    return {}


@pytest.mark.parametrize("phase", list(PHASES))
@pytest.mark.parametrize(("size", "every"), [(2, 1), (8, 3)])
def test_a_slow_phase_of_one_rank_is_named(phase: str, size: int, every: int) -> None:
    ranks = ranks_of(size, 120, lambda rank, step: {phase: 0.012} if rank == 1 and step % every == 0 else {})
    (found,) = find_stragglers(ranks, 6.0)
    assert (found.rank, found.phase) == (1, phase)
    assert found.share == pytest.approx(1 / every, abs=0.05)
    assert found.late_s == pytest.approx(0.012, abs=0.002)


def test_two_slow_ranks_are_both_named() -> None:
    slow = {1: (0, "data"), 2: (1, "forward")}
    ranks = ranks_of(
        8, 400, lambda rank, step: {slow[rank][1]: 0.03} if rank in slow and step % 4 == slow[rank][0] else {}
    )
    assert sorted((one.rank, one.phase) for one in find_stragglers(ranks, 10.0)) == [(1, "data"), (2, "forward")]


@pytest.mark.parametrize("noise", [0.02, 0.3, 1.0])
@pytest.mark.parametrize("size", [2, 8])
def test_chance_names_nobody(size: int, noise: float) -> None:
    for seed in range(25):
        assert find_stragglers(ranks_of(size, 150, never, seed, noise), 6.0) == []


def test_what_costs_little_or_was_seldom_seen_is_not_named() -> None:
    assert find_stragglers(ranks_of(2, 150, lambda rank, step: {"data": 0.001} if rank else {}), 6.0) == []
    assert find_stragglers(ranks_of(2, 15, lambda rank, step: {"data": 0.1} if rank else {}), 6.0) == []
    assert find_stragglers(ranks_of(2, 150, lambda rank, step: {"data": 9} if rank and step == 3 else {}), 6.0) == []
    assert find_stragglers(ranks_of(1, 150, never), 6.0) == []
    assert find_stragglers([], 6.0) == []
    assert find_stragglers([RankTimes({1: PHASES}), RankTimes({2: PHASES})], 6.0) == []  # no step of both


@pytest.mark.parametrize(
    ("times", "is_named"),
    [
        ([[0.01] * 5, [0.31] * 5], True),
        ([[0.01] * 3, [0.31] * 3], False),  # too few
        ([[0.01] * 5, [0.05] * 5], False),  # too cheap for a fit of 6 s
        ([[1.0] * 5, [1.2] * 5], False),  # no longer than others take
        ([[0.01, 0.4, 0.4, 0.01, 0.01], [0.31] * 5], False),  # now one, now the other
        ([[], [0.31] * 5], False),  # one rank alone
    ],
)
@pytest.mark.parametrize(("phase", "word"), [("checkpoint", "saves"), ("validation", "validations")])
def test_saves_and_validations_have_their_own_limits(
    times: Sequence[Sequence[float]], is_named: bool, phase: str, word: str
) -> None:
    found = find_stragglers([RankTimes(whole={phase: one}) for one in times], 6.0)
    text = f"rank 1 was waited for in 100% of 5 {word} (median 300 ms late)"
    assert [str(one) for one in found] == [text] * is_named


@pytest.mark.parametrize(("late_s", "is_named"), [(0.007, False), (0.13, True)])
def test_a_rank_is_not_named_for_milliseconds_of_a_short_fit(late_s: float, is_named: bool) -> None:
    found = find_stragglers([RankTimes(whole={"checkpoint": one}) for one in ([0.002 + late_s] * 4, [0.002] * 4)], 0.2)
    assert [one.rank for one in found] == [0] * is_named


def test_the_text_names_rank_share_phase_and_time() -> None:
    text = "rank 3 was waited for in 31% of the steps, in data loading (median 12 ms late)"
    assert str(Straggler(3, "data", 0.31, 0.012)) == text
