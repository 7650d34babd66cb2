from __future__ import annotations

import json
import pickle
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from loopwright.errors import ConfigError, MissingDependency
from loopwright.loggers import WandbLogger

wandb = pytest.importorskip("wandb")

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:wandb", "ignore::DeprecationWarning:pydantic")


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("WANDB_PROJECT", "WANDB_MODE", "WANDB_RUN_ID", "WANDB_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_CONSOLE", "off")
    yield
    wandb.teardown()


def make(folder: Path, **kwargs: Any) -> WandbLogger:
    return WandbLogger(save_dir=folder, offline=True, settings=wandb.Settings(x_disable_stats=True), **kwargs)


def blocks(data: bytes) -> Iterator[bytes]:
    """The records of a .wandb file: a leveldb log, after 7 bytes, in blocks of 32 KiB."""
    position, record = 7, b""
    while position + 7 <= len(data):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + 7])
        record += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield record
            record = b""


def records(folder: Path) -> list[Any]:
    from wandb.proto import wandb_internal_pb2

    wandb.teardown()  # waits for wandb's own process, which writes the files after finish() has returned
    files = sorted((folder / "wandb").glob("offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime_ns)
    return [wandb_internal_pb2.Record.FromString(data) for file in files for data in blocks(file.read_bytes())]


def points(folder: Path) -> list[dict[str, Any]]:
    rows = []
    for record in records(folder):
        if record.WhichOneof("record_type") == "history":
            row = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
            rows.append({key: value for key, value in row.items() if not key.startswith("_")})
    return rows


def test_what_is_logged_is_on_disk_with_its_axis(tmp_path: Path) -> None:
    logger = make(tmp_path, project="mine", name="first", prefix="p")
    logger.log_hyperparams({"lr": 0.1, "model": {"width": 3}})
    logger.log_metrics({"loss": torch.tensor(0.5)}, 3)
    logger.log_metrics({"loss": 0.25})
    logger.finalize("success")
    assert points(tmp_path) == [{"p-loss": 0.5, "trainer/global_step": 3}, {"p-loss": 0.25, "trainer/global_step": 4}]
    runs = [record.run for record in records(tmp_path) if record.WhichOneof("record_type") == "run"]
    assert {(run.run_id, run.project, run.display_name) for run in runs} == {(logger.version, "mine", "first")}
    config = {
        item.key or item.nested_key[0]: json.loads(item.value_json)
        for record in records(tmp_path)
        for item in (record.config.update if record.WhichOneof("record_type") == "config" else record.run.config.update)
    }
    assert (config["lr"], config["model"]) == (0.1, {"width": 3})
    axes = {
        record.metric.glob_name: record.metric.step_metric for record in records(tmp_path) if record.metric.glob_name
    }
    assert axes == {"*": "trainer/global_step"}
    assert (logger.name, logger.save_dir) == ("mine", str(tmp_path))


def test_making_a_logger_begins_no_run_and_its_id_is_known_before(tmp_path: Path) -> None:
    logger = make(tmp_path)
    assert len(str(logger.version)) == 8
    assert pickle.loads(pickle.dumps(logger)).version == logger.version
    logger.finalize("success")
    assert not list(tmp_path.iterdir())
    assert logger.name == "loopwright_logs"


def test_a_resumed_run_has_the_same_id_and_no_point_twice(tmp_path: Path) -> None:
    killed = make(tmp_path)
    killed.log_metrics({"loss": 1.0}, 1)
    state = killed.state_dict()
    killed.log_metrics({"loss": 2.0}, 2)
    killed.log_metrics({"loss": 3.0}, 3)
    killed.finalize("failed")
    resumed = make(tmp_path)
    resumed.load_state_dict(pickle.loads(pickle.dumps(state)))
    for step in (2, 3, 4):
        resumed.log_metrics({"loss": float(step)}, step)
        resumed.log_metrics({"val": float(step)}, step)  # the earlier process did not come to this one
    resumed.finalize("success")
    assert resumed.version == killed.version
    assert [(p["trainer/global_step"], p["loss"]) for p in points(tmp_path) if "loss" in p] == [
        (1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0),
    ]  # fmt: skip
    assert [p["trainer/global_step"] for p in points(tmp_path) if "val" in p] == [2, 3, 4]


def test_a_run_that_is_started_again_under_its_id_repeats_no_step(tmp_path: Path) -> None:
    killed = make(tmp_path, id="mine")
    for step in range(5):
        killed.log_metrics({"loss": 1.0}, step)
    killed.finalize("failed")
    again = make(tmp_path, id="mine")
    with pytest.warns(UserWarning, match="has points up to step 4 from an earlier process"):
        again.log_metrics({"loss": 2.0}, 0)
    for step in range(1, 8):
        again.log_metrics({"loss": 2.0}, step)
    again.finalize("success")
    assert [row["trainer/global_step"] for row in points(tmp_path)] == list(range(8))


def test_a_logger_with_another_id_begins_a_run_of_its_own(tmp_path: Path) -> None:
    first = make(tmp_path, id="aaaa1111")
    first._lw_step = 5
    other = make(tmp_path, version="bbbb2222")
    other.load_state_dict(first.state_dict())
    assert (other.version, other._lw_step) == ("bbbb2222", -1)


def test_an_id_from_a_checkpoint_that_would_be_a_path_is_not_taken(tmp_path: Path) -> None:
    state = {**make(tmp_path, version="0123").state_dict(), "id": "../../elsewhere"}
    logger = make(tmp_path)
    logger.load_state_dict(state)
    assert logger.version != "../../elsewhere"


def test_the_axis_can_be_samples_time_or_a_metric(tmp_path: Path) -> None:
    for axis, name, x in (
        ("samples", "trainer/samples", 64),
        ("time", "trainer/seconds", 7),
        ("tokens", "tokens", 999),
    ):
        logger = make(tmp_path / axis, x_axis=axis)
        logger.wall_s = 7.9
        logger.log_row({"loss": 1.0}, 3, {"samples": 64, "tokens": 999})
        logger.finalize("success")
        assert points(tmp_path / axis) == [{"loss": 1.0, "trainer/global_step": 3, name: x}]


def test_media_text_and_tables_are_in_the_run(tmp_path: Path) -> None:
    logger = make(tmp_path)
    logger.log_image("picture", [torch.zeros(3, 4, 4), torch.ones(4, 4)], step=2, caption=["a", "b"])
    logger.log_text("note", "hello", step=2)
    logger.log_text("rows", ["x", "y"], [[1, 2]])
    logger.finalize("success")
    (said,) = [str(record.history) for record in records(tmp_path) if "picture" in str(record.history)]
    assert "images/separated" in said
    assert "captions" in said
    assert len(list(tmp_path.glob("wandb/offline-run-*/files/media/images/*.png"))) == 2
    assert len(list(tmp_path.glob("wandb/offline-run-*/files/media/table/*.json"))) == 2
    with pytest.raises(ConfigError, match="caption"):
        logger.log_image("picture", [torch.zeros(3, 4, 4)], caption=["a", "b"])
    with pytest.raises(ConfigError, match="expected a list"):
        logger.log_audio("sound", "file.wav")  # type: ignore[arg-type]


def test_a_run_that_the_program_began_is_used_and_not_ended(tmp_path: Path) -> None:
    run = wandb.init(mode="offline", dir=tmp_path, settings=wandb.Settings(x_disable_stats=True))
    logger = WandbLogger(save_dir=tmp_path)
    logger.log_metrics({"loss": 1.0}, 1)
    assert logger.experiment is run
    logger.finalize("success")
    run.log({"mine": 2.0})
    run.finish()
    assert logger.version == run.id
    assert [sorted({"loss", "mine"} & p.keys()) for p in points(tmp_path)] == [["loss"], ["mine"]]


def test_checkpoints_that_are_kept_become_an_artifact_at_the_end(tmp_path: Path) -> None:
    class Kept:
        best_model_path = last_model_path = str(tmp_path / "a.ckpt")
        best_model_score, save_top_k = torch.tensor(0.5), 1

    (tmp_path / "a.ckpt").write_bytes(b"weights")
    logger = make(tmp_path, log_model=True)
    logger.log_metrics({"loss": 1.0}, 1)
    logger.after_save_checkpoint(Kept())
    assert not logger._lw_uploaded
    logger.finalize("success")
    requests = [record for record in records(tmp_path) if "model.ckpt" in str(record)]
    assert len(requests) == 1
    assert '"best"' in str(requests[0]) and '"latest"' in str(requests[0])  # noqa: PT018


def test_above_rank_zero_there_is_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    logger = make(tmp_path)
    logger.log_hyperparams({"lr": 1})
    logger.log_metrics({"loss": 1.0}, 1)
    logger.log_image("x", torch.zeros(2, 2))
    logger.finalize("success")
    assert (logger.version, logger.state_dict(), list(tmp_path.iterdir())) == (None, {}, [])


@pytest.mark.parametrize(
    "wrong",
    [
        {"version": "a", "id": "b"},
        {"log_model": "best"},
        {"x_axis": ""},
        {"save_dir": "s3://bucket"},
        {"add_file_policy": "some"},
    ],
)
def test_bad_arguments(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        WandbLogger(**wrong)


def test_without_the_package_the_command_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loopwright.loggers.service.find_spec", lambda name: None)
    with pytest.raises(MissingDependency, match=r"pip install 'loopwright\[wandb\]'"):
        WandbLogger()
