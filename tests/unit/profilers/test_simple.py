from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loopwright.errors import ConfigError
from loopwright.profilers import SimpleProfiler


class Clock:
    def __init__(self) -> None:
        self.now_ns = 5_000_000_000

    def __call__(self) -> int:
        return self.now_ns

    def pass_s(self, seconds: float) -> None:
        self.now_ns += round(seconds * 1e9)


def timed(extended: bool = True) -> tuple[SimpleProfiler, Clock]:
    profiler, clock = SimpleProfiler(extended=extended), Clock()
    profiler._lw_clock = clock
    return profiler, clock


def table(profiler: SimpleProfiler) -> dict[str, list[str]]:
    """Label (with its indentation) to the other cells; rows in the order of the report."""
    lines = [line for line in profiler.summary().splitlines() if line.startswith("| ")][1:]
    cells = [[cell[1:-1] for cell in line[1:-1].split("|")] for line in lines]
    return {row[0].rstrip(): [cell.strip() for cell in row[1:]] for row in cells}


def fit(profiler: SimpleProfiler, clock: Clock) -> None:
    """Two steps of 3 s (1 s of it outside of forward and backward), and 2 s between them: 8 s."""
    for step in range(2):
        with profiler.profile("step"):
            with profiler.profile("forward"):
                clock.pass_s(0.5)
            with profiler.profile("backward"):
                clock.pass_s(1.0 + step * 0.5)
            clock.pass_s(1.5 - step * 0.5)
        if step == 0:
            clock.pass_s(2)


def test_the_table_says_where_the_time_went() -> None:
    profiler, clock = timed()
    profiler.setup("fit")
    fit(profiler, clock)
    assert profiler.summary().startswith("FIT Profiler Report\n-----")
    assert list(table(profiler).items()) == [
        ("Total", ["-", "-", "-", "-", "8", "100.00", "-"]),
        ("step", ["3", "3", "3", "2", "6", "75.00", "31.25"]),
        ("  backward", ["1.25", "1", "1.5", "2", "2.5", "31.25", "31.25"]),
        ("  forward", ["0.5", "0.5", "0.5", "2", "1", "12.50", "12.50"]),
        ("(outside of these)", ["-", "-", "-", "-", "2", "25.00", "25.00"]),
    ]


def test_the_plain_table_has_mean_and_total() -> None:
    profiler, clock = timed(extended=False)
    fit(profiler, clock)
    assert profiler.summary().startswith("Profiler Report\n")
    assert table(profiler)["  forward"] == ["0.5", "1"]


def test_recorded_durations_are_in_seconds() -> None:
    profiler, clock = timed()
    fit(profiler, clock)
    assert profiler.recorded_durations == {"forward": [0.5, 0.5], "backward": [1.0, 1.5], "step": [3.0, 3.0]}


def test_one_activity_at_two_places_has_two_rows() -> None:
    profiler, clock = timed()
    for outer in ("train", "validate"):
        with profiler.profile(outer), profiler.profile("transfer"):
            clock.pass_s(1)
    labels = [line.split("|")[1].rstrip() for line in profiler.summary().splitlines() if line.startswith("|")]
    assert labels.count("   transfer") == 2


def test_recursion_counts_time_once_and_adds_no_rows() -> None:
    profiler, clock = timed()
    with profiler.profile("a"):
        clock.pass_s(1)
        with profiler.profile("a"):
            clock.pass_s(2)
            with profiler.profile("a"):
                clock.pass_s(1)
    assert table(profiler)["a"] == ["2.6667", "1", "4", "3", "4", "100.00", "100.00"]
    assert len(table(profiler)) == 3


def test_activities_may_end_in_another_order() -> None:
    profiler, clock = timed()
    profiler.start("a")
    clock.pass_s(1)
    profiler.start("b")
    clock.pass_s(1)
    profiler.stop("a")
    clock.pass_s(2)
    profiler.stop("b")
    assert profiler.recorded_durations == {"a": [2.0], "b": [3.0]}
    rows = table(profiler)
    assert (rows["a"][-1], rows["  b"][-1], rows["(outside of these)"][-1]) == ("25.00", "75.00", "0.00")


def test_stop_without_start_names_what_is_open() -> None:
    profiler, _ = timed()
    profiler.start("forward")
    with pytest.raises(ConfigError, match=r"'foward'.*did you mean 'forward'"):
        profiler.stop("foward")
    with pytest.raises(ValueError, match="without a start"):
        profiler.stop("x")


def test_an_open_activity_is_marked() -> None:
    profiler, clock = timed()
    profiler.start("epoch")
    fit(profiler, clock)
    assert "epoch (still open)" in table(profiler)
    assert list(profiler.current_actions) == ["epoch"]


def test_memory_is_bounded_and_sums_are_not() -> None:
    profiler, clock = timed()
    for _ in range(SimpleProfiler.MAX_DURATIONS * 2):
        with profiler.profile("a"):
            clock.pass_s(0.001)
    assert len(profiler.recorded_durations["a"]) == SimpleProfiler.MAX_DURATIONS
    assert table(profiler)["a"][3:5] == ["2000", "2"]


def test_nothing_recorded_is_a_heading_only() -> None:
    assert table(SimpleProfiler()) == {}


def test_the_next_run_starts_from_zero_and_until_then_results_stay() -> None:
    profiler, clock = timed()
    profiler.start("before setup")
    profiler.stop("before setup")
    profiler.setup("fit")
    fit(profiler, clock)
    assert "before setup" in profiler.recorded_durations
    profiler.describe()
    assert "step" in profiler.recorded_durations
    profiler.setup("test")
    with profiler.profile("test_step"):
        clock.pass_s(1)
    assert list(profiler.recorded_durations) == ["test_step"]
    assert profiler.summary().startswith("TEST Profiler Report")


def test_the_report_file(tmp_path: Path) -> None:
    profiler, clock = timed()
    profiler.dirpath, profiler.filename = str(tmp_path), "s"
    profiler.setup("fit")
    fit(profiler, clock)
    profiler.describe()
    assert (tmp_path / "fit-s.txt").read_text() == profiler.summary()


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3), st.integers(0, 10**9)), max_size=60))
def test_self_times_never_exceed_the_wall_time(events: list[tuple[bool, int, int]]) -> None:
    profiler, clock = timed()
    first_ns = None
    last_ns = 0
    for is_start, action, wait_ns in events:
        clock.now_ns += wait_ns
        name = f"a{action}"
        if is_start:
            profiler.start(name)
        elif name in profiler.current_actions:
            profiler.stop(name)
        else:
            continue
        first_ns = clock.now_ns if first_ns is None else first_ns
        last_ns = clock.now_ns
    if first_ns is None:
        return
    rows = table(profiler)
    assert float(rows["Total"][4]) == pytest.approx((last_ns - first_ns) / 1e9, rel=1e-4)
    assert float(rows["(outside of these)"][4]) >= 0
