from __future__ import annotations

import logging
from pathlib import Path

import pytest
from toys import Net, ValidatedNet, loader, net, quiet

from loopwright.errors import ConfigError
from loopwright.profilers import (
    AdvancedProfiler,
    PassThroughProfiler,
    Profiler,
    PyTorchProfiler,
    SimpleProfiler,
    resolve_profiler,
)


class Recorder(Profiler):
    def __init__(self, dirpath: str | Path | None = None, filename: str | None = None) -> None:
        super().__init__(dirpath, filename)
        self.events: list[str] = []

    def start(self, action_name: str) -> None:
        self.events.append(f"start {action_name}")

    def stop(self, action_name: str) -> None:
        self.events.append(f"stop {action_name}")

    def summary(self) -> str:
        return "the report"

    def teardown(self, stage: str | None = None) -> None:
        self.events.append(f"teardown {stage}")


def test_a_context_is_the_activity_also_when_it_raises() -> None:
    profiler = Recorder()
    names: list[str] = []

    def fail() -> None:
        with profiler.profile("outer") as outer, profiler.profile("inner") as inner:
            names.extend([outer, inner])
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert names == ["outer", "inner"]
    assert profiler.events == ["start outer", "start inner", "stop inner", "stop outer"]


@pytest.mark.parametrize(
    ("rank", "filename", "expected"),
    [(None, "s", "fit-s.txt"), (0, "s", "fit-s-0.txt"), (3, "s", "fit-s-3.txt"), (None, "a/b:c", "fit-a_b_c.txt")],
)
def test_the_report_file_is_named_by_stage_and_rank(
    tmp_path: Path, rank: int | None, filename: str, expected: str
) -> None:
    profiler = Recorder(tmp_path / "prof", filename)
    profiler.setup("fit", local_rank=rank)
    profiler.describe()
    assert [(path.name, path.read_text()) for path in (tmp_path / "prof").iterdir()] == [(expected, "the report\n")]
    assert profiler.events == ["teardown fit"]


def test_the_report_goes_to_the_log_directory_without_a_dirpath_and_is_added_to(tmp_path: Path) -> None:
    profiler = Recorder(filename="s")
    for _ in range(2):
        profiler.setup("fit", log_dir=str(tmp_path))
        profiler.describe()
    assert (tmp_path / "fit-s.txt").read_text() == "the report\nthe report\n"


@pytest.mark.parametrize(("rank", "count"), [(None, 1), (0, 1), (1, 0)])
def test_without_a_filename_rank_zero_logs_the_report(
    caplog: pytest.LogCaptureFixture, tmp_path: Path, rank: int | None, count: int
) -> None:
    caplog.set_level(logging.INFO)
    profiler = Recorder(tmp_path)
    profiler.setup("fit", local_rank=rank)
    profiler.describe()
    assert [record.getMessage() for record in caplog.records] == ["the report"] * count
    assert profiler.local_rank == (rank or 0)


def test_pass_through_records_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    profiler = PassThroughProfiler(dirpath=None, filename=None)
    with profiler.profile("a"):
        profiler.stop("never started")
    profiler.describe()
    assert profiler.summary() == ""
    assert not caplog.records


@pytest.mark.parametrize("value", ["simple", "SIMPLE", "Simple"])
def test_simple_by_name(value: str) -> None:
    assert type(resolve_profiler(value)) is SimpleProfiler


def test_none_and_instances_are_taken_as_they_are() -> None:
    profiler = PassThroughProfiler()
    assert resolve_profiler(None) is None
    assert resolve_profiler(profiler) is profiler


@pytest.mark.parametrize(("value", "kind"), [("advanced", AdvancedProfiler), ("PyTorch", PyTorchProfiler)])
def test_others_by_name(value: str, kind: type) -> None:
    assert type(resolve_profiler(value)) is kind


@pytest.mark.parametrize(
    ("value", "message"),
    [("simpel", "did you mean 'simple'"), ("", "expected 'advanced'"), (True, "expected 'advanced'"), (3, "expected")],
)
def test_unknown_profilers_are_errors(value: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_profiler(value)


def test_a_class_is_not_an_instance() -> None:
    with pytest.raises(ConfigError, match="an instance"):
        resolve_profiler(SimpleProfiler)


# --- a window of steps, and chosen ranks ----------------------------------------------------------------------------


def windowed(**options: object) -> Recorder:
    profiler = Recorder()
    Profiler.__init__(profiler, **options)  # type: ignore[arg-type]
    profiler.setup("fit", local_rank=1)
    for _ in range(4):
        with profiler.profile("run_training_step"), profiler.profile("a"):
            pass
    return profiler


@pytest.mark.parametrize(
    ("steps", "count"), [((1, 2), 2), ("1-2", 2), ("3", 1), ("2-9", 2), ("7-9", 0), ([0, 3], 4), (None, 4)]
)
def test_all_of_a_window_of_steps_is_profiled(steps: object, count: int) -> None:
    activity = ["start run_training_step", "start a", "stop a", "stop run_training_step"]
    assert windowed(steps=steps).events == activity * count


@pytest.mark.parametrize(("ranks", "count"), [([0], 0), ([0, 1], 4), (1, 4), (None, 4)])
def test_ranks_can_be_chosen(ranks: object, count: int) -> None:
    assert windowed(ranks=ranks).events.count("start a") == count


def test_a_window_counts_from_the_beginning_of_each_run() -> None:
    profiler = windowed(steps="0")
    profiler.setup("fit")
    with profiler.profile("run_training_step"):
        pass
    assert profiler.events.count("start run_training_step") == 2


@pytest.mark.parametrize("steps", ["a-b", "5-3", (1,), 7, (-1, 2), ""])
def test_a_wrong_window_is_an_error(steps: object) -> None:
    with pytest.raises(ConfigError, match="not a window of steps"):
        SimpleProfiler(steps=steps)  # type: ignore[arg-type]


@pytest.mark.parametrize("ranks", [[], [-1], ["0"], [True]])
def test_wrong_ranks_are_an_error(ranks: object) -> None:
    with pytest.raises(ConfigError, match="no ranks"):
        SimpleProfiler(ranks=ranks)  # type: ignore[arg-type]


def test_a_window_of_a_trainer_holds_those_steps_only() -> None:
    profiler = SimpleProfiler(steps=(2, 3))
    quiet(max_epochs=1, profiler=profiler, accumulate_grad_batches=2).fit(net(), loader(20))
    counts = {name: len(times) for name, times in profiler.recorded_durations.items()}
    assert counts["run_training_step"] == 2
    assert counts["[Strategy]SingleDeviceStrategy.training_step"] == 4
    assert counts["[Strategy]SingleDeviceStrategy.optimizer_step"] == 2


def test_a_profiler_knows_the_module_and_hears_of_a_failure() -> None:
    class Watching(Recorder):
        module: object = None

        def watch(self, module: object) -> None:
            self.module = module

    class Failing(Net):
        def training_step(self, batch: object, batch_idx: int) -> None:
            raise KeyError("planned")

    profiler, module = Watching(), net(Failing)
    with pytest.raises(KeyError, match="planned"):
        quiet(max_epochs=1, profiler=profiler).fit(module, loader())
    assert profiler.module is module
    assert profiler.events[-1] == "teardown fit"


def test_the_directory_is_that_of_the_run_where_none_was_given(tmp_path: Path) -> None:
    profiler = Recorder()
    assert profiler.dirpath is None
    profiler.setup("fit", log_dir=str(tmp_path))
    assert profiler.dirpath == str(tmp_path)
    given = Recorder(tmp_path / "mine")
    given.setup("fit", log_dir=str(tmp_path))
    assert given.dirpath == tmp_path / "mine"


def test_batches_of_an_evaluation_and_the_making_of_optimizers_are_measured(tmp_path: Path) -> None:
    profiler = Recorder()
    quiet(max_epochs=1, profiler=profiler, default_root_dir=tmp_path).fit(net(ValidatedNet), loader(), loader())
    assert sum(event.endswith("configure_optimizers") for event in profiler.events) == 2
    assert profiler.events.count("start [EvalLoop].validation_next") > 1
