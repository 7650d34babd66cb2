from __future__ import annotations

import pstats
import sys
from pathlib import Path

import pytest
from toys import Net, loader, net, quiet

from loopwright.errors import ConfigError
from loopwright.profilers import AdvancedProfiler


def outer_work() -> None:
    """Called in the outer activity."""


def inner_work() -> None:
    """Called in the inner one."""


def functions(path: Path) -> dict[str, int]:
    """Return the functions that a file of pstats names, and how often each was called."""
    stats = pstats.Stats(str(path)).stats  # type: ignore[attr-defined]
    return {name: calls[1] for (_, _, name), calls in stats.items()}


def test_a_call_belongs_to_the_innermost_activity(tmp_path: Path) -> None:
    profiler = AdvancedProfiler(tmp_path, "p", dump_stats=True)
    profiler.setup("fit", local_rank=2)
    with profiler.profile("outer"):
        outer_work()
        with profiler.profile("in/ner"):
            inner_work()
            inner_work()
        outer_work()
    profiler.describe()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "fit-p-2-in_ner.prof", "fit-p-2-outer.prof", "fit-p-2.txt",
    ]  # fmt: skip
    outer, inner = functions(tmp_path / "fit-p-2-outer.prof"), functions(tmp_path / "fit-p-2-in_ner.prof")
    assert outer["outer_work"] == inner["inner_work"] == 2
    assert "inner_work" not in outer
    assert "outer_work" not in inner
    report = (tmp_path / "fit-p-2.txt").read_text()
    assert report.index("Profile stats for: outer") < report.index("Profile stats for: in/ner")
    assert sys.getprofile() is None


def test_lines_are_limited_by_number_or_fraction() -> None:
    def lines(restriction: int | float) -> int:
        profiler = AdvancedProfiler(line_count_restriction=restriction)
        with profiler.profile("a"):
            for function in (outer_work, inner_work, lambda: sorted([2, 1]), lambda: len("a")):
                function()
        return sum("(" in line and ":" in line for line in profiler.summary().splitlines()[3:])

    assert lines(1) < lines(0.5) < lines(1.0)


def test_an_activity_may_run_inside_itself_and_end_before_one_that_it_holds() -> None:
    profiler = AdvancedProfiler()
    profiler.start("a")
    profiler.start("a")
    inner_work()
    profiler.start("b")
    profiler.stop("a")
    inner_work()
    profiler.stop("b")
    profiler.stop("a")
    assert sys.getprofile() is None
    assert "inner_work" in profiler.summary()


def test_stop_without_start_is_an_error() -> None:
    profiler = AdvancedProfiler()
    profiler.start("load")
    with pytest.raises(ConfigError, match="did you mean 'load'"):
        profiler.stop("laod")
    profiler.stop("load")


@pytest.mark.parametrize("restriction", [-1, 1.5, -0.1])
def test_a_wrong_restriction_is_an_error(restriction: float) -> None:
    with pytest.raises(ConfigError, match="line_count_restriction"):
        AdvancedProfiler(line_count_restriction=restriction)


def test_nothing_recorded_is_no_report() -> None:
    profiler = AdvancedProfiler()
    profiler.setup("fit")
    assert profiler.summary() == ""


def test_a_fit_names_the_users_step_and_a_second_one_begins_anew(tmp_path: Path) -> None:
    profiler = AdvancedProfiler(tmp_path, "p", dump_stats=True)
    trainer = quiet(max_epochs=1, profiler=profiler)
    module = net()
    trainer.fit(module, loader(20))
    step = tmp_path / "fit-p-[Strategy]SingleDeviceStrategy.training_step.prof"
    assert functions(step)["training_step"] == 10
    trainer.max_epochs = 2
    trainer.fit(module, loader(8))
    assert functions(step)["training_step"] == 4


def test_after_a_failure_no_profile_is_active() -> None:
    class Failing(Net):
        def training_step(self, batch: object, batch_idx: int) -> None:
            raise KeyError("planned")

    with pytest.raises(KeyError, match="planned"):
        quiet(max_epochs=1, profiler=AdvancedProfiler()).fit(net(Failing), loader())
    assert sys.getprofile() is None
