"""Which folders are one run, what a run is called, and what is read beside its metrics."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from loopwright.errors import ConfigError, DataError
from loopwright.report.environment import describe_environment, write_environment
from loopwright.report.runs import RunReader, read_runs
from loopwright.trainer.timeline.stragglers import RankTimes

from .toy_runs import falling, fit, write_csv, write_lines


def test_two_loggers_of_a_run_are_one_run(trained: Path) -> None:
    (run,) = read_runs([trained])
    assert run.name == "line"
    assert run.kinds == ["CSV", "TensorBoard"]
    assert len(run.folders) == 2
    assert run.last_step == 23
    assert set(run.series) == {"train_loss", "val_loss", "lr-SGD"}
    assert {"time", "epoch"} <= set(run.axes)
    assert run.config == {"lr": "0.1"}
    assert run.problems == []


def test_values_have_the_digits_of_the_most_precise_logger(trained: Path) -> None:
    (run,) = read_runs([trained])
    (csv,) = read_runs([trained / "csv"])
    assert run.series["train_loss"].values == csv.series["train_loss"].values


def test_runs_that_disagree_are_two(tmp_path: Path) -> None:
    fit(tmp_path / "a", lr=0.1, epochs=1, version=0)
    fit(tmp_path / "b", lr=0.2, epochs=1, version=0)
    # One logger of each is left: different kinds, the same folder's name, the same steps, other values.
    (tmp_path / "both").mkdir()
    (tmp_path / "a" / "csv").rename(tmp_path / "both" / "csv")
    (tmp_path / "b" / "tensorboard").rename(tmp_path / "both" / "tensorboard")
    runs = read_runs([tmp_path / "both"])
    assert sorted(run.name for run in runs) == ["both/csv/version_0", "both/tensorboard/version_0"]


def test_versions_below_a_directory_are_runs_with_their_own_files(tmp_path: Path) -> None:
    for version in (0, 1):
        folder = write_csv(tmp_path / "logs" / f"version_{version}", {"loss": falling(9, begin=4.0 + version)})
        (folder / "hparams.yaml").write_text(f"lr: 0.{version + 1}\nnet:\n  width: 8\n")
        torch.save({"global_step": version}, folder / "model.ckpt")
    first, second = read_runs([tmp_path / "logs"])
    assert (first.name, second.name) == ("logs/version_0", "logs/version_1")
    assert (first.config, second.config) == ({"lr": "0.1", "net/width": "8"}, {"lr": "0.2", "net/width": "8"})
    assert [file.step for file in first.checkpoints] == [0]
    assert [file.step for file in second.checkpoints] == [1]


def test_names_are_given_or_made_different(tmp_path: Path) -> None:
    one = write_csv(tmp_path / "one" / "run", {"loss": [1.0]})
    two = write_csv(tmp_path / "two" / "run", {"loss": [2.0]})
    assert [run.name for run in read_runs([one, two])] == ["run (one/run)", "run (two/run)"]
    assert [run.name for run in read_runs([f"base={one}", two])] == ["base", "run"]
    alone = write_csv(tmp_path / "logs" / "version_3", {"loss": [1.0]})
    assert [run.name for run in read_runs([alone])] == ["logs/version_3"]


def test_a_directory_that_is_given_twice_is_one_run(tmp_path: Path) -> None:
    folder = write_csv(tmp_path / "run", {"loss": [1.0]})
    assert len(read_runs([folder, tmp_path])) == 1


def test_counters_are_axes_and_no_curves(tmp_path: Path) -> None:
    write_lines(
        tmp_path, [{"step": n, "epoch": 0, "samples": 8 * n, "tokens": 80 * n, "wall_s": n / 2, "x": 1} for n in (1, 2)]
    )
    (run,) = read_runs([tmp_path])
    assert list(run.series) == ["x"]
    assert run.axes["samples"] == ([1, 2], [8.0, 16.0])
    assert run.axes["tokens"] == ([1, 2], [80.0, 160.0])
    assert run.axes["time"] == ([1, 2], [0.5, 1.0])
    assert run.seconds == 1.0


@pytest.mark.parametrize(("value", "is_shown"), [(-1.0, False), (0.5, True)])
def test_the_stand_in_for_a_metric_of_hyperparameters_is_no_curve(value: float, is_shown: bool, tmp_path: Path) -> None:
    (run,) = read_runs([write_csv(tmp_path, {"hp_metric": [value], "loss": [1.0]})])
    assert ("hp_metric" in run.series) == is_shown


def test_a_run_that_was_resumed_has_one_curve(tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    fit(whole, version=0)
    fit(tmp_path / "cut", epochs=2, version=0)
    fit(tmp_path / "cut", version=0, ckpt_path="last")
    (expected,), (run,) = read_runs([whole]), read_runs([tmp_path / "cut"])
    assert run.kinds == ["CSV", "TensorBoard"]
    assert run.series == expected.series


# -- checkpoints -----------------------------------------------------------------------------------------------------


def test_checkpoints_say_step_score_and_role(trained: Path) -> None:
    (run,) = read_runs([trained])
    best = next(file for file in run.checkpoints if "best" in file.roles)
    last = next(file for file in run.checkpoints if "last" in file.roles)
    assert best.monitor == "val_loss"
    assert best.score == pytest.approx(min(run.series["val_loss"].values), rel=1e-6)
    assert best.size_bytes == best.path.stat().st_size
    assert last.step == 24
    assert run.environment["torch"] == torch.__version__
    assert run.environment["processes"] == "1"


def test_a_damaged_checkpoint_is_listed_with_its_problem(tmp_path: Path) -> None:
    write_csv(tmp_path, {"loss": [1.0]})
    (tmp_path / "step=7.ckpt").write_bytes(b"not a checkpoint")
    (run,) = read_runs([tmp_path])
    assert run.checkpoints[0].step == 7
    assert run.checkpoints[0].problem


def test_nothing_in_a_checkpoint_is_executed(tmp_path: Path) -> None:
    write_csv(tmp_path, {"loss": [1.0]})
    torch.save({"global_step": 1, "callbacks": Bomb()}, tmp_path / "bomb.ckpt")
    (run,) = read_runs([tmp_path])
    assert run.checkpoints[0].problem
    assert not Path("exploded").exists()


class Bomb:
    def __reduce__(self) -> tuple[object, ...]:
        return (open, ("exploded", "w"))


# -- beside the metrics ----------------------------------------------------------------------------------------------


def test_the_environment_that_was_written_is_read(tmp_path: Path) -> None:
    write_csv(tmp_path, {"loss": [1.0]})
    write_environment(tmp_path)
    (run,) = read_runs([tmp_path])
    assert run.environment == describe_environment()
    assert {"host", "system", "processor", "python", "torch"} <= set(run.environment)


def test_a_saved_timeline_is_read(tmp_path: Path) -> None:
    trainer = fit(tmp_path, epochs=1, version=0)
    trainer.timeline.ranks = [RankTimes(whole={"validation": times}) for times in ([0.0] * 4, [9.0] * 4)]
    trainer.timeline.save(tmp_path / "csv" / "version_0" / "timeline.json")
    (run,) = read_runs([tmp_path])
    assert "rank 1 was waited for in 100% of 4 validations (median 9 s late)" in run.timeline_notes
    assert {"forward", "backward"} <= set(run.timeline)
    assert sum(run.timeline.values()) == pytest.approx(sum(trainer.timeline.seconds().values()))
    assert any(note.startswith("bound by: ") for note in run.timeline_notes)


def test_files_that_cannot_be_read_are_named_and_the_run_is_shown(tmp_path: Path) -> None:
    write_csv(tmp_path, {"loss": [1.0]})
    (tmp_path / "hparams.yaml").write_text("a: [1\n")
    (tmp_path / "timeline.json").write_text("{")
    (run,) = read_runs([tmp_path])
    assert len(run.problems) == 2
    assert run.series["loss"].values == [1.0]


def test_hyperparameters_of_another_library_cannot_run_code(tmp_path: Path) -> None:
    write_csv(tmp_path, {"loss": [1.0]})
    (tmp_path / "hparams.yaml").write_text("a: !!python/object/apply:os.system ['exit 1']\n")
    (run,) = read_runs([tmp_path])
    assert "hparams.yaml" in run.problems[0]


# -- bad input -------------------------------------------------------------------------------------------------------


def test_a_directory_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        read_runs([tmp_path, tmp_path / "nowhere"])
    with pytest.raises(ConfigError, match="No directory was given"):
        read_runs([])


def test_a_directory_without_metrics_is_an_error(tmp_path: Path) -> None:
    full = write_csv(tmp_path / "full", {"loss": [1.0]})
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"empty: no metrics\.csv") as caught:
        read_runs([full, tmp_path / "empty"])
    assert "full" not in caught.value.what


def test_a_reader_waits_for_the_first_run(tmp_path: Path) -> None:
    reader = RunReader([tmp_path])
    assert reader.read() == []
    write_lines(tmp_path / "run", [json.loads('{"step": 0, "loss": 1.0}')])
    assert [run.last_step for run in reader.read()] == [0]
    write_lines(tmp_path / "run", [{"step": 5, "loss": 1.0}])
    assert [run.last_step for run in reader.read()] == [5]


def test_a_run_of_three_loggers_is_one_run(tmp_path: Path) -> None:
    from loopwright.loggers.json_lines import JSONLinesLogger

    trainer = fit(tmp_path, version=0, more_loggers=[JSONLinesLogger(tmp_path, name="lines", version=0)])
    (run,) = read_runs([tmp_path])
    assert run.kinds == ["JSON lines", "CSV", "TensorBoard"]
    assert run.axes["samples"][1][-1] == 96
    assert run.series["val_loss"].values[-1] == float(trainer.callback_metrics["val_loss"])


def test_runs_are_read_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for number in (0, 2, 10):
        folder = tmp_path / f"version_{number}"
        folder.mkdir()
        (folder / "metrics.csv").write_text("step,loss\n0,1.0\n")
    assert [run.name.rsplit("/")[-1] for run in read_runs([tmp_path])] == ["version_0", "version_2", "version_10"]
