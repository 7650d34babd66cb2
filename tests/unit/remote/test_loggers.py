"""Loggers, a Trainer's root, reports: at URLs."""

from __future__ import annotations

import csv
import io
import json
import logging
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from object_store import ObjectStore
from torch.utils.data import DataLoader

import loopwright as lw
from loopwright.cli.commands.report import report, watch
from loopwright.errors import ConfigError
from loopwright.loggers import CSVLogger, JSONLinesLogger, TensorBoardLogger
from loopwright.loggers.folder import FolderLogger
from loopwright.remote.mirror import RemoteFolder
from loopwright.remote.store import RemoteStore
from loopwright.report import read_runs

KINDS = pytest.mark.parametrize("kind", [CSVLogger, JSONLinesLogger, TensorBoardLogger])


class Net(lw.Module):
    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters({"lr": 0.1})
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = self.layer(batch).square().mean()
        self.log("loss", loss)
        if self.trainer.current_epoch == 1:
            self.log("late", loss)  # a new column
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Killed(Exception):
    pass


class Kill(lw.Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: lw.Trainer, *args: Any) -> None:
        if trainer.global_step == self.step:
            raise Killed


def fit(logger: Any, root: str | Path, *, callbacks: Any = (), **arguments: Any) -> lw.Trainer:
    torch.manual_seed(0)
    ckpt_path, max_epochs = arguments.pop("ckpt_path", None), arguments.pop("max_epochs", 2)
    trainer = lw.Trainer(
        max_epochs=max_epochs, accelerator="cpu", log_every_n_steps=1, logger=logger, default_root_dir=root,
        enable_progress_bar=False, enable_model_summary=False, callbacks=list(callbacks), **arguments,
    )  # fmt: skip
    data = torch.arange(48.0).reshape(12, 4) / 48
    trainer.fit(Net(), DataLoader(data, batch_size=2), ckpt_path=ckpt_path)
    return trainer


def content(logger: FolderLogger) -> Any:
    """What a logger's file says, without times."""
    store = RemoteStore(logger.log_dir)
    if isinstance(logger, CSVLogger):
        return store.read("metrics.csv").decode()
    if isinstance(logger, JSONLinesLogger):
        rows = [json.loads(line) for line in store.read("metrics.jsonl").splitlines()]
        return [{key: value for key, value in row.items() if key != "wall_s"} for row in rows]
    (run,) = read_runs([logger.log_dir], checkpoints=False)
    return {name: (series.steps, series.values) for name, series in run.series.items()}


@KINDS
def test_a_run_at_a_url_is_the_one_of_a_local_folder(kind: type[FolderLogger], url: str, tmp_path: Path) -> None:
    local, remote = kind(tmp_path), kind(url)
    fit(local, tmp_path)
    fit(remote, tmp_path / "other")
    assert remote.log_dir == f"{url}/loopwright_logs/version_0"
    mine = read_runs([local.log_dir], checkpoints=False)[0]
    its = read_runs([remote.log_dir], checkpoints=False)[0]
    assert {name: (one.steps, one.values) for name, one in mine.series.items()} == {
        name: (one.steps, one.values) for name, one in its.series.items()
    }
    assert its.config == mine.config
    assert its.environment == mine.environment
    assert its.timeline
    if isinstance(local, CSVLogger):
        assert content(remote) == Path(local.log_dir, "metrics.csv").read_text()
    assert not [name for name in RemoteStore(url).files() if "/." in name or ".part-" in name]


@KINDS
@pytest.mark.parametrize("killed_at", [4, 8])
def test_a_run_that_is_killed_continues_exactly(
    kind: type[FolderLogger], killed_at: int, url: str, tmp_path: Path
) -> None:
    whole = kind(url, name="whole")
    fit(whole, tmp_path)
    saves = lw.ModelCheckpoint(tmp_path / "kept", "{step}", every_n_train_steps=3, save_top_k=-1)
    broken = kind(url, name="broken")
    with pytest.raises(Killed):
        fit(broken, tmp_path, callbacks=[saves, Kill(killed_at)])
    before = broken.log_dir
    again = kind(url, name="broken")  # as in a new process, which has none of the files
    fit(again, tmp_path, ckpt_path=str(tmp_path / "kept" / f"step={killed_at // 3 * 3}.ckpt"))
    assert again.log_dir == before
    assert content(again) == content(whole)


@KINDS
def test_what_a_checkpoint_counts_has_arrived(kind: type[FolderLogger], objects: str) -> None:
    logger = kind(objects)
    for step in range(30):
        logger.log_metrics({"loss": 1.0 / (step + 1)}, step)
    logger.state_dict()  # and then the machine is gone
    (run,) = read_runs([objects], checkpoints=False)
    assert run.series["loss"].steps == list(range(30))
    assert run.places == [f"{objects}/loopwright_logs/version_0"]


@KINDS
def test_rows_wait_while_the_store_is_down_and_come_once(
    kind: type[FolderLogger], objects: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loopwright.remote.mirror._SHARE", 0)
    monkeypatch.setattr("loopwright.remote.mirror._EVERY_S", 0.0)

    class Outage(lw.Callback):
        def on_train_batch_end(self, trainer: lw.Trainer, *args: Any) -> None:
            ObjectStore.is_down = 3 <= trainer.global_step < 9

    logger = kind(objects)
    logger.writes_behind = False
    with pytest.warns(UserWarning, match="is down"):
        fit(logger, tmp_path, callbacks=[Outage()], enable_checkpointing=False)
    (run,) = read_runs([objects], checkpoints=False)
    assert run.series["loss"].steps == list(range(12))
    if isinstance(logger, CSVLogger):
        assert len(list(csv.DictReader(io.StringIO(content(logger))))) == 12


@pytest.mark.parametrize("version", [None, 3])
def test_a_store_that_takes_nothing_is_found_before_training(
    objects: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int | None
) -> None:
    def no_bucket(*args: Any, **kwargs: Any) -> None:
        raise FileNotFoundError("The specified bucket does not exist")

    monkeypatch.setattr(ObjectStore, "pipe_file", no_bucket)
    with pytest.raises(ConfigError, match="CSVLogger: logs cannot be written to objects.*bucket does not exist"):
        fit(CSVLogger(objects, version=version), tmp_path, callbacks=[Kill(1)], enable_checkpointing=False)


@pytest.mark.filterwarnings("ignore:CSVLogger failed", "ignore:What the run ran on")
def test_a_folder_that_cannot_be_made_does_not_hide_the_first_error(
    objects: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_bucket(self: RemoteFolder, url: str) -> bool:
        raise FileNotFoundError("The specified bucket does not exist")

    monkeypatch.setattr(RemoteFolder, "claim", no_bucket)
    with pytest.raises(Killed):
        fit(CSVLogger(objects), tmp_path, callbacks=[Kill(1)], enable_checkpointing=False)


def test_loggers_of_one_trainer_share_a_version(url: str, tmp_path: Path) -> None:
    loggers = [CSVLogger(url), JSONLinesLogger(url), TensorBoardLogger(url)]
    fit(loggers, tmp_path)
    names = {name.partition("0.")[0].split(".")[0] for name in RemoteStore(loggers[0].log_dir).names()}
    assert {logger.log_dir for logger in loggers} == {f"{url}/loopwright_logs/version_0"}
    assert {"metrics", "events", "hparams", "environment", "timeline", "checkpoints"} >= names >= {"metrics", "events"}
    fit([CSVLogger(url)], tmp_path)
    assert RemoteStore(url).names("loopwright_logs") == {"version_0", "version_1"}


def test_hyperparameters_of_an_earlier_run_are_kept(url: str) -> None:
    CSVLogger(url, version="a").log_hyperparams({"lr": 1})
    with pytest.warns(UserWarning, match=r"hparams\.1\.yaml"):
        CSVLogger(url, version="a").log_hyperparams({"lr": 2})
    store = RemoteStore(f"{url}/loopwright_logs/a")
    assert (store.read("hparams.1.yaml"), store.read("hparams.yaml")) == (b"lr: 1\n", b"lr: 2\n")


def test_pictures_and_texts_arrive(url: str) -> None:
    logger = CSVLogger(url)
    logger.log_image("samples", [torch.rand(3, 4, 4)], step=2, caption=["noise"])
    logger.log_text("notes", "good", step=2)
    logger.finalize("success")
    assert RemoteStore(logger.log_dir).files("media").keys() == {
        "media/samples/2-0.png", "media/samples/2-0.txt", "media/notes/2.txt",
    }  # fmt: skip


def test_large_event_files_are_followed_by_others(objects: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loopwright.loggers.tensorboard._MOST_SENT_AGAIN", 20_000)
    logger = TensorBoardLogger(objects)
    for step in range(900):
        logger.log_metrics({"loss": 1.0 / (step + 1)}, step)
        if step % 300 == 299:
            logger.save()
    logger.finalize("success")
    names = [name for name in RemoteStore(logger.log_dir).names() if ".tfevents." in name]
    assert len(names) > 1
    (run,) = read_runs([objects], checkpoints=False)
    assert run.series["loss"].steps == list(range(900))


def test_a_trainer_whose_root_is_a_url(url: str, caplog: pytest.LogCaptureFixture) -> None:
    profiler = lw.profilers.SimpleProfiler(filename="profile")
    with caplog.at_level(logging.INFO, logger="loopwright"):
        trainer = fit(True, url, profiler=profiler)
    folder = f"{url}/loopwright_logs/version_0"
    assert trainer.log_dir == folder
    assert {"hparams.yaml", "environment.json", "timeline.json", "fit-profile.txt"} <= RemoteStore(folder).names()
    assert RemoteStore(folder).names("checkpoints") == {"epoch=1-step=12.ckpt"}
    assert any(
        one.startswith(f"Logs: {folder}\n") and one.endswith(f"loopwright report {folder}") for one in caplog.messages
    )
    assert any(f"newest {folder}/checkpoints/epoch=1-step=12.ckpt" in message for message in caplog.messages)
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="loopwright"):
        fit(True, url, max_epochs=3, ckpt_path="last")
    path = f"{folder.partition('://')[2]}/checkpoints/epoch=1-step=12.ckpt"
    assert any(message.startswith("Resuming at epoch 2, step 12") and path in message for message in caplog.messages)


def test_no_folder_is_made_here_that_is_called_like_a_url(url: str, tmp_path: Path) -> None:
    fit(True, url, callbacks=[lw.StopFile(), lw.MemorySnapshot()], profiler="simple")
    assert not {path.name for path in tmp_path.iterdir()} - {"shared"}


def test_report_and_watch_read_urls(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logger = JSONLinesLogger(url)
    fit(logger, url)
    assert report([f"mine={url}", "-o", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text()
    assert f"<code>{logger.log_dir}</code>" in page
    assert "epoch=1-step=12.ckpt" in page
    assert "1 checkpoint" in capsys.readouterr().out
    assert watch(["--once", url]) == 0
    assert "loss" in capsys.readouterr().out
    assert report([f"{url}/nowhere"]) == 2
    assert f"No such directory: {url}/nowhere" in capsys.readouterr().err


def test_large_checkpoints_are_named_and_not_fetched(objects: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loopwright.remote.reader._MOST_COPIED", 100)
    fit(True, objects)
    ObjectStore.read_bytes = 0
    (run,) = read_runs([objects])
    assert [(file.step, file.problem) for file in run.checkpoints] == [(12, "")]
    assert run.checkpoints[0].size_bytes > 10_000
    assert ObjectStore.read_bytes < run.checkpoints[0].size_bytes


@pytest.mark.parametrize("scheme", ["file://", "local://"])
def test_local_schemes_are_local_folders(scheme: str, tmp_path: Path) -> None:
    logger = CSVLogger(f"{scheme}{tmp_path}", version=0)
    logger.log_metrics({"a": 1.0}, 0)
    logger.finalize("success")
    assert (tmp_path / "loopwright_logs" / "version_0" / "metrics.csv").is_file()


@KINDS
def test_other_ranks_send_nothing(kind: type[FolderLogger], objects: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    logger = kind(objects)
    logger.log_metrics({"a": 1.0}, 0)
    logger.log_hyperparams({"lr": 1})
    assert logger.state_dict() == {}
    logger.save()
    logger.finalize("success")
    assert not fsspec.filesystem("objects").find("bucket")
