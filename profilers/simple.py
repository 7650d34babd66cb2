"""SimpleProfiler: a table of the time of a run by activity, in memory that does not grow with the run."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter_ns

from .base import Profiler, not_started

_NS_PER_S = 1e9
_UNNAMED = "(outside of these)"


@dataclass(slots=True)
class _Activity:
    """What is known of one activity at one place in the nesting; times in nanoseconds."""

    name: str
    inside: dict[str, _Activity] = field(default_factory=dict)
    num_calls: int = 0
    num_open: int = 0
    sum_ns: int = 0  # over all calls
    total_ns: int = 0  # while at least one call was open: a call inside a call counts once
    self_ns: int = 0  # while nothing ran inside
    min_ns: int = 0
    max_ns: int = 0

    def add(self, duration_ns: int) -> None:
        self.min_ns = duration_ns if not self.num_calls else min(self.min_ns, duration_ns)
        self.max_ns = max(self.max_ns, duration_ns)
        self.num_calls += 1
        self.sum_ns += duration_ns


class SimpleProfiler(Profiler):
    """Measure the wall time of every activity, and report it as a table with indented nested activities.

    Percentages refer to the time between the first start and the last stop. `Self %` is the time without nested
    activities, so that the column sums to 100 %. Times are measured on the host: the work of a GPU is counted in the
    activity that waits for it.

    Counts and sums are kept for each activity at each place in the nesting. Single durations are kept for the last
    `MAX_DURATIONS` activities of each name.

    Args:
        dirpath: Directory of the report file; None is the run's log directory.
        filename: Middle of the report file's name, `<stage>-<filename>[-<rank>].txt`; None logs the report.
        extended: Whether the table also has calls, minimum, maximum and percentages.
        steps: Training steps to profile; see `Profiler`.
        ranks: Ranks to profile; see `Profiler`.
    """

    MAX_DURATIONS = 1000

    def __init__(
        self,
        dirpath: str | os.PathLike[str] | None = None,
        filename: str | None = None,
        extended: bool = True,
        *,
        steps: tuple[int, int] | str | None = None,
        ranks: Sequence[int] | None = None,
    ) -> None:
        super().__init__(dirpath, filename, steps=steps, ranks=ranks)
        self.extended = extended
        self._lw_clock = perf_counter_ns
        self._lw_is_over = False
        self._lw_reset()

    def _lw_reset(self) -> None:
        self._lw_root = _Activity("")
        self._lw_open: list[tuple[_Activity, int]] = []  # the innermost last, with its start in nanoseconds
        self._lw_durations: dict[str, deque[float]] = {}
        self._lw_first_ns: int | None = None
        self._lw_last_event_ns = 0

    @property
    def recorded_durations(self) -> dict[str, list[float]]:
        """Name of each activity -> its last `MAX_DURATIONS` durations in seconds, oldest first."""
        return {name: list(durations) for name, durations in self._lw_durations.items()}

    @property
    def current_actions(self) -> dict[str, float]:
        """Name of each open activity -> its start, in seconds of `time.perf_counter`."""
        return {activity.name: start / _NS_PER_S for activity, start in self._lw_open}

    def setup(self, stage: str, local_rank: int | None = None, log_dir: str | None = None) -> None:
        """Begin a run, and discard the records of an earlier run that has ended.

        Args:
            stage: "fit", "validate", "test" or "predict".
            local_rank: Rank among the processes of this node; None with one process.
            log_dir: The run's log directory.
        """
        super().setup(stage, local_rank, log_dir)
        if self._lw_is_over:
            self._lw_reset()
            self._lw_is_over = False

    def teardown(self, stage: str | None = None) -> None:
        """End a run; the records stay readable until the next `setup`.

        Args:
            stage: "fit", "validate", "test" or "predict".
        """
        self._lw_is_over = True

    def start(self, action_name: str) -> None:
        """Record the start of an activity, inside the open one.

        Args:
            action_name: Name of the activity. It may be open already.
        """
        now = self._lw_tick()
        outer = self._lw_open[-1][0] if self._lw_open else self._lw_root
        if outer.name == action_name:
            activity = outer  # a call inside a call: one row, so that recursion does not grow the table
        else:
            activity = outer.inside.get(action_name) or outer.inside.setdefault(action_name, _Activity(action_name))
        activity.num_open += 1
        self._lw_open.append((activity, now))

    def stop(self, action_name: str) -> None:
        """Record the end of the activity of this name that began last; others may still be open inside it.

        Args:
            action_name: Name of the activity.

        Raises:
            ConfigError: No activity of this name is open.
        """
        now = self._lw_tick()
        for index in range(len(self._lw_open) - 1, -1, -1):
            activity, start = self._lw_open[index]
            if activity.name == action_name:
                break
        else:
            raise not_started(action_name, [activity.name for activity, _ in self._lw_open])
        del self._lw_open[index]
        duration = now - start
        activity.add(duration)
        activity.num_open -= 1
        if not activity.num_open:
            activity.total_ns += duration
        durations = self._lw_durations.get(action_name)
        if durations is None:
            durations = self._lw_durations[action_name] = deque(maxlen=self.MAX_DURATIONS)
        durations.append(duration / _NS_PER_S)

    def summary(self) -> str:
        """Return the table; only its heading without a recorded activity."""
        rows = list(self._lw_rows())
        cells = [self._lw_heading(), *rows]
        widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
        rule = "-" * (sum(widths) + 3 * len(widths) + 1)
        lines = [f"{(self._stage or '').upper()} Profiler Report".strip(), rule, _line(cells[0], widths), rule]
        lines += [_line(row, widths) for row in rows]
        return "\n".join([*lines, rule, ""])

    def _lw_tick(self) -> int:
        # The time since the last event belongs to the innermost open activity, in whatever order activities end.
        now = self._lw_clock()
        if self._lw_open:
            self._lw_open[-1][0].self_ns += now - self._lw_last_event_ns
        elif self._lw_first_ns is None:
            self._lw_first_ns = now
        self._lw_last_event_ns = now
        return now

    def _lw_heading(self) -> list[str]:
        if not self.extended:
            return ["Action", "Mean duration (s)", "Total time (s)"]
        return [
            "Action",
            "Mean duration (s)",
            "Min (s)",
            "Max (s)",
            "Num calls",
            "Total time (s)",
            "Percentage %",
            "Self %",
        ]

    def _lw_rows(self) -> Iterator[list[str]]:
        if self._lw_first_ns is None:
            return
        wall = self._lw_last_event_ns - self._lw_first_ns
        yield self._lw_row("Total", None, wall, wall, None)
        named = 0
        for depth, activity in _walk(self._lw_root, 0):
            named += activity.self_ns
            yield self._lw_row("  " * depth + activity.name, activity, activity.total_ns, wall, activity.self_ns)
        yield self._lw_row(_UNNAMED, None, wall - named, wall, wall - named)

    def _lw_row(
        self, label: str, activity: _Activity | None, total_ns: int, wall_ns: int, self_ns: int | None
    ) -> list[str]:
        def seconds(value: float | None) -> str:
            return "-" if value is None else f"{value / _NS_PER_S:.5g}"

        def percent(value: int | None) -> str:
            return "-" if value is None or not wall_ns else f"{100 * value / wall_ns:.2f}"

        calls = activity.num_calls if activity else 0
        if activity and activity.num_open:
            label += " (still open)"
        mean = activity.sum_ns / calls if activity and calls else None
        if not self.extended:
            return [label, seconds(mean), seconds(total_ns)]
        extremes = (activity.min_ns, activity.max_ns) if activity and calls else (None, None)
        return [
            label,
            seconds(mean),
            seconds(extremes[0]),
            seconds(extremes[1]),
            str(calls) if activity else "-",
            seconds(total_ns),
            percent(total_ns),
            percent(self_ns),
        ]


def _walk(activity: _Activity, depth: int) -> Iterator[tuple[int, _Activity]]:
    for inner in sorted(activity.inside.values(), key=lambda each: each.total_ns, reverse=True):
        yield depth, inner
        yield from _walk(inner, depth + 1)


def _line(cells: list[str], widths: list[int]) -> str:
    first = cells[0].ljust(widths[0])
    rest = [cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True)]
    return f"| {' | '.join([first, *rest])} |"
