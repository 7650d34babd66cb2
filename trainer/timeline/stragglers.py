"""Ranks that the others waited for, found from what each rank has measured of itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import sqrt
from statistics import median

from ...messages import counted
from .phases import readable_time

_WAITING = "communication"
_WHERE = {
    "data": "data loading", "transfer": "moving batches to the device", "forward": "the forward pass",
    "backward": "the backward pass", "clip": "gradient clipping", "optimizer": "the optimizer",
    "schedule": "learning rate schedules", "hooks": "hooks", "loop": "the loop",
}  # fmt: skip
_TIMES = {"checkpoint": "save", "validation": "validation"}
_IN_ALL = 20_000  # steps that all ranks together send
_LEAST_LATE = 0.1  # of a step
_LEAST_LOST = 0.05  # of all measured steps
_SIGMAS = 4.0  # chance makes each rank the last one now and then
_LEAST_TIMES, _MOSTLY = 4, 0.75  # saves or validations
_LEAST_LOST_WHOLE, _LEAST_LOST_WHOLE_S = 0.1, 0.5  # of the fit, and in seconds


@dataclass(frozen=True, slots=True)
class RankTimes:
    """Seconds that a rank has measured of itself.

    Attributes:
        steps: Step to seconds by phase, of the last measured steps.
        whole: Phase ("checkpoint", "validation") to what each one took this rank itself, without waiting for others.
    """

    steps: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    whole: Mapping[str, Sequence[float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Straggler:
    """A rank that the others waited for.

    Attributes:
        rank: Global rank.
        phase: Phase in which it was late.
        share: In which part of the measured steps, saves or validations it was the last one, and late.
        late_s: Seconds by which it was late in the median of these, compared with the rank before it.
        times: Number of saves or validations; 0 for steps.
    """

    rank: int
    phase: str
    share: float
    late_s: float
    times: int = 0

    def __str__(self) -> str:
        late = f"(median {readable_time(self.late_s)} late)"
        if self.times:
            what = counted(self.times, _TIMES[self.phase])
            return f"rank {self.rank} was waited for in {self.share:.0%} of {what} {late}"
        return f"rank {self.rank} was waited for in {self.share:.0%} of the steps, in {_WHERE[self.phase]} {late}"


def most_steps(world_size: int) -> int:
    """Return how many steps each rank sends."""
    return max(32, min(400, _IN_ALL // world_size))


def find_stragglers(ranks: Sequence[RankTimes], total_s: float) -> list[Straggler]:
    """Return the ranks that the others waited for, those of steps first; none where chance may have made them late.

    A rank is late in a step if all its phases but communication took longer than those of any other rank, by a tenth of
    a step. It is named if the steps in which it was late cost a twentieth of the time, and are more than those of other
    ranks (in the median) by four standard deviations of what chance brings: at least 16. For saves and validations, it
    must be the last in three quarters of at least four, take half as long again as the rank before it, and cost a tenth
    of the fit, at least half a second: in a fit of milliseconds a rank that alone writes the file would be named.

    Args:
        ranks: What each rank has measured.
        total_s: Seconds of the fit.
    """
    if len(ranks) < 2:
        return []
    found = _in_steps([one.steps for one in ranks])
    for phase in _TIMES:
        straggler = _in_whole(phase, [one.whole.get(phase, ()) for one in ranks], total_s)
        found += [] if straggler is None else [straggler]
    return found


def _in_steps(ranks: Sequence[Mapping[int, Mapping[str, float]]]) -> list[Straggler]:
    common = sorted(set(ranks[0]).intersection(*ranks[1:]))
    if not common:
        return []
    durations = [max(sum(one[step].values()) for one in ranks) for step in common]
    late_from = _LEAST_LATE * median(durations)
    late: dict[int, list[tuple[float, str]]] = {}
    for step in common:
        busy = [sum(taken for phase, taken in one[step].items() if phase != _WAITING) for one in ranks]
        last, before = sorted(range(len(ranks)), key=busy.__getitem__)[:-3:-1]
        if busy[last] - busy[before] >= late_from:
            phase = _late_phase([one[step] for one in ranks], last)
            late.setdefault(last, []).append((busy[last] - busy[before], phase))
    found = []
    for rank, times in late.items():
        by_chance = median(len(late.get(number, ())) for number in range(len(ranks)) if number != rank)
        if len(times) - by_chance < _SIGMAS * sqrt(len(times) + by_chance):
            continue
        if sum(seconds for seconds, _ in times) < _LEAST_LOST * sum(durations):
            continue
        in_phase: dict[str, float] = {}
        for seconds, phase in times:
            in_phase[phase] = in_phase.get(phase, 0.0) + seconds
        phase = max(in_phase, key=in_phase.__getitem__)
        found.append(Straggler(rank, phase, len(times) / len(common), median(one for one, _ in times)))
    return sorted(found, key=lambda one: -one.share)


def _late_phase(step: Sequence[Mapping[str, float]], last: int) -> str:
    others = [one for number, one in enumerate(step) if number != last]
    own = {phase: taken for phase, taken in step[last].items() if phase != _WAITING}
    return max(own, key=lambda phase: own[phase] - median(one.get(phase, 0.0) for one in others))


def _in_whole(phase: str, ranks: Sequence[Sequence[float]], total_s: float) -> Straggler | None:
    times = list(zip(*ranks, strict=False))
    late: dict[int, list[tuple[float, float]]] = {}
    for took in times:
        last, before = sorted(range(len(took)), key=took.__getitem__)[:-3:-1]
        late.setdefault(last, []).append((took[last] - took[before], took[before]))
    for rank, found in late.items():
        late_s, before_s = (median(one) for one in zip(*found, strict=True))
        is_mostly = len(times) >= _LEAST_TIMES and len(found) >= _MOSTLY * len(times)
        least_s = max(_LEAST_LOST_WHOLE * total_s, _LEAST_LOST_WHOLE_S)
        if is_mostly and late_s >= before_s / 2 and sum(one for one, _ in found) >= least_s:
            return Straggler(rank, phase, len(found) / len(times), late_s, times=len(times))
    return None
