"""Runs in Trackio's database, in a folder of the test; nothing is sent."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from apart import add_apart_to_path
from toys import Net, loader, net, quiet

from loopwright.errors import MissingDependency
from loopwright.loggers import TrackioLogger

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_apart_to_path(monkeypatch)
    pytest.importorskip("trackio", reason="no trackio: make .venv/apart/installed")
    for name in ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):
        monkeypatch.delenv(name, raising=False)
    for module in [one for one in sys.modules.values() if getattr(one, "__name__", "").startswith("trackio")]:
        for name in ("TRACKIO_DIR", "MEDIA_DIR"):  # read from the environment when it is imported
            if hasattr(module, name):
                monkeypatch.setattr(module, name, tmp_path / "database" / ("media" if name == "MEDIA_DIR" else ""))


def points(project: str, run: str, name: str) -> list[tuple[int, float]]:
    from trackio.sqlite_storage import SQLiteStorage

    rows = SQLiteStorage.get_logs(project, run)
    return [(row["step"], row[name]) for row in rows if name in row]


class Logged(Net):
    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.save_hyperparameters()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("train_loss", loss)
        return loss


def fit(logger: TrackioLogger, root: Path, epochs: int, ckpt_path: str | None = None) -> None:
    trainer = quiet(
        max_epochs=epochs, log_every_n_steps=1, logger=logger, default_root_dir=root, enable_checkpointing=True
    )
    trainer.fit(net(Logged), loader(), ckpt_path=ckpt_path)


def test_what_is_logged_is_in_the_database(tmp_path: Path) -> None:
    from trackio.sqlite_storage import SQLiteStorage

    logger = TrackioLogger("mine", "first", tmp_path, prefix="p")
    logger.log_hyperparams({"lr": 0.1, "model": {"width": 3}})
    logger.log_metrics({"loss": torch.tensor(0.5)}, 3)
    logger.log_metrics({"loss": 0.25})
    logger.log_text("note", "hello", step=4)
    logger.log_image("picture", torch.zeros(3, 4, 4), step=4, caption=["black"])
    logger.finalize("success")
    assert points("mine", "first", "p-loss") == [(3, 0.5), (4, 0.25)]
    config = SQLiteStorage.get_run_config("mine", "first")
    assert config is not None
    assert (config["lr"], config["model"]) == (0.1, {"width": 3})
    assert "hello" in str(points("mine", "first", "note"))
    assert "black" in str(points("mine", "first", "picture"))
    logger.log_image("two", [torch.zeros(3, 4, 4), torch.ones(4, 4)], step=4)
    logger.finalize("success")
    assert (len(points("mine", "first", "two/0")), len(points("mine", "first", "two/1"))) == (1, 1)


def test_a_resumed_run_continues_and_sends_no_point_twice(tmp_path: Path) -> None:
    fit(TrackioLogger("mine", save_dir=tmp_path), tmp_path, 2)
    (checkpoint,) = tmp_path.glob("mine/*/checkpoints/*.ckpt")
    name = checkpoint.parent.parent.name
    before = points("mine", name, "train_loss")
    assert [step for step, _ in before] == list(range(8))
    fit(TrackioLogger("mine", save_dir=tmp_path), tmp_path, 3, str(checkpoint))
    after = points("mine", name, "train_loss")
    assert after[:8] == before
    assert [step for step, _ in after] == list(range(12))
    assert points("mine", name, "trainer/global_step")[-1][1] == 11


def test_a_logger_goes_to_another_process_with_its_run(tmp_path: Path) -> None:
    logger = TrackioLogger("mine", save_dir=tmp_path)
    logger.log_metrics({"loss": 1.0}, 1)
    logger.finalize("success")
    other = pickle.loads(pickle.dumps(logger))
    assert other.version == logger.version
    other.log_metrics({"loss": 2.0}, 2)
    other.finalize("success")
    assert points("mine", str(logger.version), "loss") == [(1, 1.0), (2, 2.0)]


def test_ranks_above_zero_record_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    logger = TrackioLogger("mine", "silent", tmp_path)
    logger.log_metrics({"loss": 1.0}, 1)
    logger.log_text("note", "hello")
    logger.finalize("success")
    assert points("mine", "silent", "loss") == []


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loopwright.loggers.service.find_spec", lambda module: None)
    with pytest.raises(MissingDependency, match=r"loopwright\[trackio\]"):
        TrackioLogger()
