from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from loopwright.errors import ConfigError, MissingDependency
from loopwright.loggers import MLFlowLogger

pytest.importorskip("mlflow")


@pytest.fixture(autouse=True)
def _no_store_of_mine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_ALLOW_FILE_STORE"):
        monkeypatch.delenv(name, raising=False)


def points(logger: MLFlowLogger, name: str) -> list[tuple[int, float]]:
    return [(point.step, point.value) for point in logger.experiment.get_metric_history(logger.run_id, name)]


def test_what_is_logged_is_in_the_store(tmp_path: Path) -> None:
    logger = MLFlowLogger("digits", run_name="first", tags={"who": 1}, save_dir=tmp_path, prefix="p")
    logger.log_hyperparams({"lr": 0.1, "model": {"width": 3}, "long": "x" * 900})
    logger.log_metrics({"loss": torch.tensor(0.5), "a:b": 1}, 3)
    logger.log_metrics({"loss": float("nan")})
    run = logger.experiment.get_run(logger.run_id)
    assert run.data.params == {"lr": "0.1", "model/width": "3", "long": "x" * 900}
    assert (run.data.tags["who"], run.info.run_name, run.info.status) == ("1", "first", "RUNNING")
    assert points(logger, "p-a_b") == [(3, 1.0)]
    assert str(points(logger, "p-loss")) == "[(3, 0.5), (4, nan)]"
    assert (logger.version, logger.name) == (run.info.run_id, run.info.experiment_id)
    assert logger.save_dir == str(tmp_path)
    assert "MLFLOW_ALLOW_FILE_STORE" not in os.environ


@pytest.mark.parametrize(("status", "kept"), [("success", "FINISHED"), ("finished", "FINISHED"), ("failed", "FAILED")])
def test_finalize_says_how_it_ended(tmp_path: Path, status: str, kept: str) -> None:
    logger = MLFlowLogger(save_dir=tmp_path)
    logger.log_metrics({"a": 1.0}, 0)
    client, run_id = logger.experiment, logger.run_id
    logger.finalize(status)
    assert client.get_run(run_id).info.status == kept


def test_a_run_that_has_ended_is_read_without_being_opened(tmp_path: Path) -> None:
    logger = MLFlowLogger(save_dir=tmp_path)
    logger.log_metrics({"a": 1.0}, 0)
    logger.finalize("success")
    read = (logger.run_id, logger.version, logger.name, logger.experiment_id, logger.save_dir)
    assert logger.experiment.get_run(str(read[0])).info.status == "FINISHED"
    copy = pickle.loads(pickle.dumps(logger))
    other = MLFlowLogger(save_dir=tmp_path, run_id=logger.run_id)
    for one in (copy, other):
        assert (one.run_id, one.version, one.name, one.experiment_id, one.save_dir) == read
        assert one.experiment.get_run(str(read[0])).info.status == "FINISHED"
    logger.log_metrics({"a": 2.0}, 1)  # a record opens it
    assert logger.experiment.get_run(str(read[0])).info.status == "RUNNING"
    logger.finalize("success")


def test_names_that_the_store_cannot_tell_apart_stay_two(tmp_path: Path) -> None:
    logger = MLFlowLogger(save_dir=tmp_path)
    with pytest.warns(UserWarning, match="'a_b' is recorded as 'a_b_[0-9a-f]{8}'; 'a:b' has its name"):
        logger.log_metrics({"a:b": 1.0, "a_b": 2.0}, 0)
    resumed = MLFlowLogger(save_dir=tmp_path)
    resumed.load_state_dict(pickle.loads(pickle.dumps(logger.state_dict())))
    resumed.log_metrics({"a_b": 4.0}, 1)
    resumed.log_metrics({"a:b": 3.0}, 1)
    second = next(name for name in logger.experiment.get_run(logger.run_id).data.metrics if name != "a_b")
    assert points(logger, "a_b") == [(0, 1.0), (1, 3.0)]
    assert points(logger, second) == [(0, 2.0), (1, 4.0)]
    long = MLFlowLogger(save_dir=tmp_path)
    long.log_metrics({"x" * 300 + "1": 1.0, "x" * 300 + "2": 2.0}, 0)
    assert sorted(long.experiment.get_run(long.run_id).data.metrics.values()) == [1.0, 2.0]


def test_values_that_are_too_long_are_kept_whole_in_a_file(tmp_path: Path) -> None:
    logger = MLFlowLogger(save_dir=tmp_path)
    with pytest.warns(UserWarning, match="the values of text are longer than the 6000 characters"):
        logger.log_hyperparams({"text": "x" * 7000, "lr": 0.1})
    assert logger.experiment.get_run(logger.run_id).data.params == {"text": "x" * 6000, "lr": "0.1"}
    (file,) = tmp_path.rglob("hparams.yaml")
    assert f"text: {'x' * 7000}" in file.read_text()


def test_a_run_that_is_started_again_under_its_id_repeats_no_step(tmp_path: Path) -> None:
    killed = MLFlowLogger(save_dir=tmp_path)
    for step in range(5):
        killed.log_metrics({"loss": 1.0}, step)
    again = MLFlowLogger(save_dir=tmp_path, run_id=killed.run_id)
    with pytest.warns(UserWarning, match="has points up to step 4 from an earlier process"):
        again.log_metrics({"loss": 2.0}, 0)
    for step in range(1, 8):
        again.log_metrics({"loss": 2.0, "acc": 0.5}, step)
    assert [step for step, _ in points(again, "loss")] == list(range(8))
    assert [step for step, _ in points(again, "acc")] == list(range(1, 8))


def test_making_a_logger_writes_nothing(tmp_path: Path) -> None:
    MLFlowLogger(save_dir=tmp_path / "runs").finalize("success")
    assert not list(tmp_path.iterdir())


def test_two_loggers_share_an_experiment_and_not_a_run(tmp_path: Path) -> None:
    first, second = (MLFlowLogger("one", save_dir=tmp_path) for _ in range(2))
    assert first.experiment_id == second.experiment_id
    assert first.run_id != second.run_id


def test_a_resumed_run_has_the_same_id_and_no_point_twice(tmp_path: Path) -> None:
    killed = MLFlowLogger(save_dir=tmp_path)
    killed.log_hyperparams({"lr": 1})
    killed.log_metrics({"loss": 1.0}, 1)
    state = killed.state_dict()
    for step in (2, 3):
        killed.log_metrics({"loss": 9.0}, step)
    resumed = MLFlowLogger(save_dir=tmp_path)
    resumed.load_state_dict(pickle.loads(pickle.dumps(state)))
    resumed.log_hyperparams({"lr": 1})
    for step in (2, 3, 4):
        resumed.log_metrics({"loss": float(step), "val": 0.0}, step)
    resumed.finalize("success")
    assert resumed.version == killed.version
    assert points(resumed, "loss") == [(1, 1.0), (2, 9.0), (3, 9.0), (4, 4.0)]
    assert points(resumed, "val") == [(2, 0.0), (3, 0.0), (4, 0.0)]


def test_another_experiment_begins_a_run_of_its_own(tmp_path: Path) -> None:
    first = MLFlowLogger("one", save_dir=tmp_path)
    first.log_metrics({"a": 1.0}, 1)
    second = MLFlowLogger("two", save_dir=tmp_path)
    second.load_state_dict(first.state_dict())
    assert second.run_id != first.run_id


def test_media_are_artifacts(tmp_path: Path) -> None:
    logger = MLFlowLogger(save_dir=tmp_path)
    logger.log_image("val/x", [torch.zeros(3, 4, 4)], step=2, caption=["black"])
    logger.log_text("note", "hello", step=3)
    logger.log_graph(torch.nn.Linear(2, 1))
    run = logger.experiment.get_run(logger.run_id)
    folder = Path(run.info.artifact_uri.removeprefix("file://"))
    assert sorted(str(path.relative_to(folder)) for path in folder.rglob("*.*")) == [
        "media/note/3.txt", "media/val/x/2-0.png", "media/val/x/2-0.txt", "model.txt",
    ]  # fmt: skip


def test_checkpoints_are_artifacts_with_facts(tmp_path: Path) -> None:
    class Kept:
        best_model_path = last_model_path = str(tmp_path / "a.ckpt")
        best_model_score, save_top_k = torch.tensor(0.5), 1

    (tmp_path / "a.ckpt").write_bytes(b"weights")
    logger = MLFlowLogger(save_dir=tmp_path / "runs", log_model="all")
    logger.after_save_checkpoint(Kept())
    logger.after_save_checkpoint(Kept())
    run = logger.experiment.get_run(logger.run_id)
    folder = Path(run.info.artifact_uri.removeprefix("file://")) / "checkpoints" / "a"
    assert (folder / "a.ckpt").read_bytes() == b"weights"
    assert (folder / "aliases.txt").read_text() == "['best', 'last']\n"
    assert "score: 0.5" in (folder / "metadata.yaml").read_text()


def test_a_thousand_metrics_and_more_go_in_several_batches(tmp_path: Path) -> None:
    logger = MLFlowLogger(save_dir=tmp_path)
    logger.log_metrics({f"m{number}": 1.0 for number in range(1001)}, 0)
    assert len(logger.experiment.get_run(logger.run_id).data.metrics) == 1001


def test_above_rank_zero_there_is_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    logger = MLFlowLogger(save_dir=tmp_path)
    logger.log_metrics({"loss": 1.0}, 1)
    logger.log_hyperparams({"a": 1})
    logger.finalize("success")
    assert (logger.version, logger.name, list(tmp_path.iterdir())) == (None, None, [])


@pytest.mark.parametrize("wrong", [{"experiment_name": ""}, {"log_model": "best"}, {"x_axis": ""}])
def test_bad_arguments(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        MLFlowLogger(**wrong)


def test_without_the_package_the_command_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loopwright.loggers.service.find_spec", lambda name: None)
    with pytest.raises(MissingDependency, match=r"pip install 'loopwright\[mlflow\]'"):
        MLFlowLogger()
