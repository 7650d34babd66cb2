from __future__ import annotations

import json
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from loopwright.errors import ConfigError, MissingDependency
from loopwright.loggers import CometLogger

pytest.importorskip("comet_ml")

QUIET: dict[str, Any] = {
    "log_code": False, "log_graph": False, "parse_args": False, "display_summary_level": 0, "log_git_metadata": False,
    "log_git_patch": False, "log_env_details": False, "auto_output_logging": False, "name": "test",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMET_ERROR_TRACKING_ENABLE", "false")
    monkeypatch.setenv("COMET_DISABLE_ANNOUNCEMENT", "1")


def make(folder: Path, **kwargs: Any) -> CometLogger:
    return CometLogger(online=False, offline_directory=str(folder), **QUIET, **kwargs)


def messages(folder: Path, kind: str) -> list[dict[str, Any]]:
    found = []
    for archive in sorted(folder.glob("*.zip"), key=lambda path: path.stat().st_mtime_ns):
        with zipfile.ZipFile(archive) as file:
            found += [json.loads(line) for line in file.read("messages.json").splitlines()]
    return [message["payload"] for message in found if message["type"] == kind]


def points(folder: Path, name: str) -> list[tuple[int, float]]:
    metrics = [message["metric"] for message in messages(folder, "metric_msg")]
    return [(metric["step"], metric["metricValue"]) for metric in metrics if metric["metricName"] == name]


def test_what_is_logged_is_in_the_archive(tmp_path: Path) -> None:
    logger = make(tmp_path, project="mine", prefix="p")
    logger.log_hyperparams({"lr": 0.1, "model": {"width": 3}})
    logger.log_metrics({"loss": torch.tensor(0.5)}, 3)
    logger.log_image("picture", torch.zeros(3, 4, 4), step=3, caption=["black"])
    logger.log_text("note", "hello", step=3)
    logger.log_graph(torch.nn.Linear(2, 1))
    logger.finalize("success")
    assert points(tmp_path, "p-loss") == [(3, 0.5)]
    parameters = {m["param"]["paramName"]: m["param"]["paramValue"] for m in messages(tmp_path, "parameter_msg")}
    assert (parameters["lr"], parameters["model/width"]) == (0.1, 3)
    (archive,) = tmp_path.glob("*.zip")
    assert archive.name.startswith(str(logger.version))
    assert "Linear(in_features=2" in json.dumps(messages(tmp_path, "graph"))
    uploads = json.dumps(messages(tmp_path, "file_upload"))
    assert "picture" in uploads
    assert (logger.name, logger.save_dir) == ("mine", str(tmp_path))


def test_a_resumed_run_has_the_same_key_and_no_point_twice(tmp_path: Path) -> None:
    killed = make(tmp_path)
    killed.log_metrics({"loss": 1.0, "epoch": 0}, 1)
    state = killed.state_dict()
    killed.log_metrics({"loss": 2.0}, 2)
    killed.finalize("failed")
    resumed = make(tmp_path)
    resumed.load_state_dict(pickle.loads(pickle.dumps(state)))
    for step in (2, 3):
        resumed.log_metrics({"loss": float(step)}, step)
    resumed.finalize("success")
    assert resumed.version == killed.version
    assert points(tmp_path, "loss") == [(1, 1.0), (2, 2.0), (3, 3.0)]


def test_an_experiment_that_is_started_again_under_its_key_repeats_no_step(tmp_path: Path) -> None:
    killed = make(tmp_path, experiment_key="a" * 32)
    killed.log_metrics({"loss": 1.0}, 0)
    killed.finalize("failed")
    again = make(tmp_path, experiment_key="a" * 32)
    with pytest.warns(UserWarning, match="has points up to step 0 from an earlier process"):
        again.log_metrics({"loss": 2.0}, 0)
    again.log_metrics({"loss": 2.0}, 1)
    again.finalize("success")
    assert [step for step, _ in points(tmp_path, "loss")] == [0, 1]


def test_making_a_logger_begins_nothing_and_its_key_is_known_before(tmp_path: Path) -> None:
    logger = make(tmp_path)
    assert len(str(logger.version)) == 32
    assert pickle.loads(pickle.dumps(logger)).version == logger.version
    logger.finalize("success")
    assert not list(tmp_path.iterdir())


def test_above_rank_zero_there_is_no_experiment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    logger = make(tmp_path)
    logger.log_metrics({"loss": 1.0}, 1)
    logger.finalize("success")
    assert (logger.version, list(tmp_path.iterdir())) == (None, [])


@pytest.mark.parametrize(
    "wrong", [{"mode": "new"}, {"experiment_key": "short"}, {"log_cod": True}, {"x_axis": ""}, {"log_model": "best"}]
)
def test_bad_arguments(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        CometLogger(**wrong)


def test_without_the_package_the_command_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loopwright.loggers.service.find_spec", lambda name: None)
    with pytest.raises(MissingDependency, match=r"pip install 'loopwright\[comet\]'"):
        CometLogger()
