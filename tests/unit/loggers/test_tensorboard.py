from __future__ import annotations

import math
import os
import pickle
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from loopwright.errors import ConfigError, MissingDependency
from loopwright.loggers import TensorBoardLogger


def raw_points(log_dir: str) -> list[tuple[str, int, float]]:
    """Every scalar on disk, in the order of the files, with nothing purged."""
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    points = []
    for path in sorted(Path(log_dir).glob("events.out.tfevents.*"), key=lambda file: file.stat().st_ctime_ns):
        for event in LegacyEventFileLoader(str(path)).Load():
            points += [(value.tag, event.step, value.simple_value) for value in event.summary.value]
    return points


def scalars_of(log_dir: str) -> list[tuple[str, int, float]]:
    return [point for point in raw_points(log_dir) if not point[0].startswith("_hparams_")]


def seen_by_tensorboard(log_dir: str, tag: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(log_dir)
    accumulator.Reload()
    return [(event.step, event.value) for event in accumulator.Scalars(tag)]


def hparams_of(log_dir: str) -> dict[str, Any]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams import plugin_data_pb2

    accumulator = EventAccumulator(log_dir)
    accumulator.Reload()
    content = accumulator.PluginTagToContent("hparams")
    return {tag.rsplit("/", 1)[-1]: plugin_data_pb2.HParamsPluginData.FromString(data) for tag, data in content.items()}


def test_points_are_written_with_their_steps(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path)
    logger.log_metrics({"loss": 0.5, "val/acc": torch.tensor(0.25)}, 3)
    logger.log_metrics({"loss": 0.25}, 7)
    logger.finalize("success")
    assert scalars_of(logger.log_dir) == [("loss", 3, 0.5), ("val/acc", 3, 0.25), ("loss", 7, 0.25)]
    assert seen_by_tensorboard(logger.log_dir, "loss") == [(3, 0.5), (7, 0.25)]


def test_nan_shows_as_nan(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path)
    logger.log_metrics({"loss": float("nan")}, 0)
    logger.finalize("success")
    assert math.isnan(scalars_of(logger.log_dir)[0][2])


def test_without_a_step_the_last_plus_one_is_taken(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path)
    for step in (None, None, 9, None):
        logger.log_metrics({"a": 1.0}, step)
    logger.finalize("success")
    assert [step for _, step, _ in scalars_of(logger.log_dir)] == [0, 1, 9, 10]


def test_nested_mappings_and_prefix(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path, prefix="run")
    logger.log_metrics({"loss": {"train": 1.0, "val": 2.0}}, 0)
    logger.finalize("success")
    assert [tag for tag, _, _ in scalars_of(logger.log_dir)] == ["run-loss/train", "run-loss/val"]


def test_a_bad_value_names_its_key_and_writes_nothing(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path)
    with pytest.raises(ConfigError, match="'b'"):
        logger.log_metrics({"a": 1.0, "b": "x"}, 0)
    assert not tmp_path.joinpath("loopwright_logs").exists()


def test_unknown_arguments_get_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="did you mean 'flush_secs'"):
        TensorBoardLogger("logs", flush_sec=3)


def test_missing_tensorboard_is_said_when_the_logger_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loopwright.loggers.tensorboard.find_spec", lambda name: None)
    with pytest.raises(MissingDependency, match="pip install tensorboard"):
        TensorBoardLogger("logs")


def test_sub_dir(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path, version=0, sub_dir="train")
    logger.log_metrics({"a": 1.0}, 0)
    logger.log_hyperparams({"lr": 1})
    logger.finalize("success")
    assert logger.sub_dir == "train"
    assert logger.log_dir == os.path.join(str(tmp_path), "loopwright_logs", "version_0", "train")
    assert scalars_of(logger.log_dir)[0] == ("a", 0, 1.0)
    assert Path(logger.log_dir, "hparams.yaml").exists()


def test_hyperparameters_wait_for_the_first_metric_but_the_file_does_not(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path)
    logger.log_hyperparams({"lr": 0.1, "model": {"width": 3, "act": "relu"}})
    assert os.listdir(logger.log_dir) == ["hparams.yaml"]
    logger.log_metrics({"a": 1.0}, 5)
    logger.finalize("success")
    assert scalars_of(logger.log_dir) == [("hp_metric", 0, -1.0), ("a", 5, 1.0)]
    start = hparams_of(logger.log_dir)["session_start_info"].session_start_info
    assert start.hparams["lr"].number_value == 0.1
    assert start.hparams["model/width"].number_value == 3
    assert start.hparams["model/act"].string_value == "relu"


def test_finalize_writes_hyperparameters_that_are_still_pending(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path)
    logger.log_hyperparams({"lr": 0.1})
    logger.finalize("success")
    assert scalars_of(logger.log_dir) == [("hp_metric", 0, -1.0)]


@pytest.mark.parametrize(
    ("default", "metrics", "step", "points"),
    [
        (True, None, None, [("hp_metric", 0, -1.0)]),
        (False, None, None, []),
        (True, 0.5, None, [("hp_metric", 0, 0.5)]),
        (False, torch.tensor(0.5), 3, [("hp_metric", 3, 0.5)]),
        (True, {"acc": 1.0, "loss": 2.0}, 2, [("acc", 2, 1.0), ("loss", 2, 2.0)]),
    ],
)
def test_metric_of_hyperparameters(tmp_path: Path, default: bool, metrics: Any, step: int | None, points: Any) -> None:
    logger = TensorBoardLogger(tmp_path, default_hp_metric=default)
    logger.log_hyperparams({"lr": 0.1}, metrics, step=step)
    logger.finalize("success")
    assert scalars_of(logger.log_dir) == points


@pytest.mark.parametrize("params", [None, {}])
def test_no_hyperparameters_open_no_event_file(tmp_path: Path, params: Any) -> None:
    logger = TensorBoardLogger(tmp_path)
    logger.log_hyperparams(params)
    logger.finalize("success")
    assert os.listdir(logger.log_dir) == ["hparams.yaml"]


@pytest.mark.parametrize(("status", "value"), [("success", 1), ("finished", 1), ("failed", 2)])
def test_how_the_run_ended_is_recorded(tmp_path: Path, status: str, value: int) -> None:
    logger = TensorBoardLogger(tmp_path)
    logger.log_hyperparams({"lr": 0.1})
    logger.finalize(status)
    assert hparams_of(logger.log_dir)["session_end_info"].session_end_info.status == value


def test_a_second_fit_goes_on_after_finalize_and_repeats_no_hyperparameters(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path, purge_step=1)
    for step in (1, 2):
        logger.log_hyperparams({"lr": 0.1})
        logger.log_metrics({"a": 1.0}, step)
        logger.finalize("success")
    logger.finalize("success")
    assert scalars_of(logger.log_dir) == [("hp_metric", 0, -1.0), ("a", 1, 1.0), ("a", 2, 1.0)]
    assert seen_by_tensorboard(logger.log_dir, "a") == [(1, 1.0), (2, 1.0)]


def test_hyperparameters_after_the_first_metric_are_written_at_once(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path)
    logger.log_metrics({"a": 1.0}, 1)
    logger.log_hyperparams({"lr": 0.1}, {"best": 2.0}, step=1)
    logger.save()
    assert scalars_of(logger.log_dir) == [("a", 1, 1.0), ("best", 1, 2.0)]


def log_steps(logger: TensorBoardLogger, first: int, last: int) -> None:
    """Two records per step, as a step's metrics and a validation's at the same step are."""
    logger.log_hyperparams({"lr": 0.1})
    for step in range(first, last):
        logger.log_metrics({"loss": 1 / (step + 1)}, step)
        logger.log_metrics({"val": 2 / (step + 1)}, step)


def uninterrupted(directory: Path) -> list[tuple[str, int, float]]:
    logger = TensorBoardLogger(directory)
    log_steps(logger, 0, 10)
    logger.finalize("success")
    return scalars_of(logger.log_dir)


def test_resumed_points_equal_the_uninterrupted_runs(tmp_path: Path) -> None:
    killed = TensorBoardLogger(tmp_path / "b")
    log_steps(killed, 0, 4)
    killed.log_metrics({"loss": 1 / 5}, 4)
    state = killed.state_dict()
    killed.log_metrics({"val": 2 / 5}, 4)  # same step as the checkpoint, and after it
    log_steps(killed, 5, 8)
    killed.finalize("failed")
    resumed = TensorBoardLogger(tmp_path / "b")
    resumed.load_state_dict(pickle.loads(pickle.dumps(state)))
    resumed.log_hyperparams({"lr": 0.1})
    resumed.log_metrics({"val": 2 / 5}, 4)
    log_steps(resumed, 5, 10)
    resumed.finalize("success")
    assert resumed.log_dir == killed.log_dir
    assert scalars_of(resumed.log_dir) == uninterrupted(tmp_path / "a")
    assert seen_by_tensorboard(resumed.log_dir, "loss") == seen_by_tensorboard(
        str(tmp_path / "a/loopwright_logs/version_0"), "loss"
    )
    assert hparams_of(resumed.log_dir)["session_end_info"].session_end_info.status == 1


def test_a_killed_and_resumed_process_writes_no_point_twice(tmp_path: Path) -> None:
    code = f"""
import os, pickle, signal
from loopwright.loggers import TensorBoardLogger
logger = TensorBoardLogger({str(tmp_path / "b")!r}, flush_secs=1, max_queue=1)
logger.log_hyperparams({{"lr": 0.1}})
for step in range(9):
    if step == 6:
        pickle.dump(logger.state_dict(), open({str(tmp_path / "state")!r}, "wb"))
    logger.log_metrics({{"loss": 1 / (step + 1)}}, step)
    logger.log_metrics({{"val": 2 / (step + 1)}}, step)
logger.save()
logger.log_metrics({{"loss": 3.0}}, 9)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], timeout=60)
    assert done.returncode == -signal.SIGKILL
    resumed = TensorBoardLogger(tmp_path / "b")
    resumed.load_state_dict(pickle.loads((tmp_path / "state").read_bytes()))
    log_steps(resumed, 6, 10)
    resumed.finalize("success")
    assert scalars_of(resumed.log_dir) == uninterrupted(tmp_path / "a")


def test_a_live_tensorboard_is_told_which_steps_to_purge(tmp_path: Path) -> None:
    before = TensorBoardLogger(tmp_path)
    log_steps(before, 0, 3)
    state = before.state_dict()
    after = TensorBoardLogger(tmp_path)
    after.load_state_dict(state)
    assert after.experiment.purge_step is None
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    after.finalize("success")
    starts = [
        event.step
        for path in Path(after.log_dir).glob("events.*")
        for event in LegacyEventFileLoader(str(path)).Load()
        if event.HasField("session_log")
    ]
    assert starts == [3]


def test_nothing_is_dropped_before_the_resumed_run_writes(tmp_path: Path) -> None:
    before = TensorBoardLogger(tmp_path)
    log_steps(before, 0, 3)
    state = before.state_dict()
    log_steps(before, 3, 6)
    before.finalize("failed")
    points = raw_points(before.log_dir)
    after = TensorBoardLogger(tmp_path)
    after.load_state_dict(state)
    after.log_hyperparams({"lr": 0.1})
    assert after.state_dict() == state
    after.finalize("failed")
    assert raw_points(before.log_dir) == points


def test_a_second_fit_with_the_same_logger_goes_back_too(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path / "b")
    log_steps(logger, 0, 4)
    state = logger.state_dict()
    logger.log_metrics({"loss": 9.0}, 9)
    logger.load_state_dict(state)
    log_steps(logger, 4, 10)
    logger.finalize("success")
    assert scalars_of(logger.log_dir) == uninterrupted(tmp_path / "a")


def test_a_state_from_before_the_first_point(tmp_path: Path) -> None:
    before = TensorBoardLogger(tmp_path / "b")
    before.log_hyperparams({"lr": 0.1})
    state = before.state_dict()
    log_steps(before, 0, 2)
    before.finalize("failed")
    after = TensorBoardLogger(tmp_path / "b")
    after.load_state_dict(state)
    log_steps(after, 0, 10)
    after.finalize("success")
    assert after.log_dir == before.log_dir
    assert scalars_of(after.log_dir) == uninterrupted(tmp_path / "a")


def test_a_missing_directory_is_said_and_a_fresh_one_taken(tmp_path: Path) -> None:
    before = TensorBoardLogger(tmp_path)
    log_steps(before, 0, 3)
    state = before.state_dict()
    before.finalize("failed")
    shutil.rmtree(before.log_dir)
    after = TensorBoardLogger(tmp_path)
    with pytest.warns(UserWarning, match="starts a new run"):
        after.load_state_dict(state)
    after.log_metrics({"a": 1.0}, 3)
    after.finalize("success")
    assert scalars_of(after.log_dir) == [("a", 3, 1.0)]


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 3)
        self.frozen = nn.BatchNorm1d(3).eval()
        self.drop = nn.Dropout(0.5)
        self.example_input_array = torch.zeros(1, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.drop(self.frozen(self.layer(x)))
        return out


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_the_graph_is_written_and_changes_nothing_of_the_training(tmp_path: Path) -> None:
    model = Small()
    before = torch.get_rng_state()
    logger = TensorBoardLogger(tmp_path, log_graph=True)
    logger.log_graph(model)
    logger.log_graph(model)
    assert torch.equal(torch.get_rng_state(), before)
    assert model.training
    assert model.drop.training
    assert not model.frozen.training
    logger.finalize("success")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(logger.log_dir)
    accumulator.Reload()
    assert any("layer" in node.name for node in accumulator.Graph().node)


def test_without_the_option_no_graph_is_written(tmp_path: Path) -> None:
    TensorBoardLogger(tmp_path).log_graph(Small())
    assert not list(tmp_path.iterdir())


def test_a_graph_needs_an_input(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="example_input_array"):
        TensorBoardLogger(tmp_path, log_graph=True).log_graph(nn.Linear(1, 1))


def test_pickling_leaves_the_writer_out(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path)
    logger.log_metrics({"a": 1.0}, 0)
    copied = pickle.loads(pickle.dumps(logger))
    copied.log_metrics({"a": 2.0}, 1)
    copied.finalize("success")
    logger.finalize("success")
    assert copied.log_dir == logger.log_dir
    assert sorted(scalars_of(logger.log_dir)) == [("a", 0, 1.0), ("a", 1, 2.0)]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # of tensorboard's own thread
def test_a_full_disk_leaves_no_empty_files(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path, name="", version="")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        for step in range(2):
            with pytest.raises(OSError, match="File too large"):
                logger.log_metrics({"a": 1.0}, step)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.glob("*.tfevents.*")) == []
    logger.log_metrics({"a": 2.0}, 2)
    logger.finalize("success")
    assert scalars_of(str(tmp_path)) == [("a", 2, 2.0)]
