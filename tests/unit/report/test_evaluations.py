"""Evaluations in processes of their own belong to the runs of their checkpoints."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

import loopwright as lw
from loopwright.report.evaluations import EVALUATION_FILE, add_evaluated
from loopwright.report.runs import read_runs

from .toy_runs import Line

DATA = torch.utils.data.DataLoader(torch.linspace(-1, 1, 8)[:, None], batch_size=4)
QUIET = {"accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False}


class LineWithTest(Line):
    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return super().training_step([batch], batch_idx)

    def test_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("test_loss", (self.layer(batch) - 3 * batch).square().mean(), batch_size=len(batch))


def trainer(logs: Path) -> lw.Trainer:
    logger = lw.CSVLogger(logs.parent, name=logs.name)
    return lw.Trainer(max_epochs=2, log_every_n_steps=1, limit_val_batches=0, logger=logger, **QUIET)


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    """Two trainings, version_0 and version_1, and a test of the first's checkpoint, version_2."""
    for lr in (0.1, 0.2):
        trainer(tmp_path / "logs").fit(LineWithTest(lr), DATA)
    evaluate(tmp_path / "logs", 0)
    return tmp_path / "logs"


def evaluate(logs: Path, *versions: int) -> None:
    one = trainer(logs)
    for version in versions:
        [checkpoint] = (logs / f"version_{version}").rglob("*.ckpt")
        one.test(LineWithTest(), DATA, ckpt_path=checkpoint, verbose=False)


def test_a_test_is_shown_with_the_run_of_its_checkpoint(logs: Path) -> None:
    first, second = read_runs([logs])
    assert [folder.name for folder in first.folders] == ["version_0", "version_2"]
    assert first.series["test_loss"].steps == [first.checkpoints[0].step - 1]
    assert "test_loss" not in second.series
    assert "train_loss" in first.series


def test_logs_that_were_moved_and_given_one_by_one_still_belong_together(logs: Path) -> None:
    moved = logs.with_name("moved")
    shutil.move(logs, moved)
    [run] = read_runs([moved / "version_2", moved / "version_0"])
    assert {"train_loss", "test_loss"} <= run.series.keys()


def test_a_second_test_extends_the_curve_of_the_first(logs: Path) -> None:
    [checkpoint] = (logs / "version_0").rglob("*.ckpt")
    content = torch.load(checkpoint)
    content["loopwright"]["progress"]["steps"] = 2
    earlier = checkpoint.with_name("earlier.ckpt")
    torch.save(content, earlier)
    trainer(logs).test(LineWithTest(), DATA, ckpt_path=earlier, verbose=False)
    first, _ = read_runs([logs])
    assert first.series["test_loss"].steps == [1, 3]


def test_a_test_of_several_runs_and_one_of_a_run_elsewhere_remain(logs: Path, tmp_path: Path) -> None:
    evaluate(logs, 0, 1)
    assert [run.name for run in read_runs([logs])] == ["logs/version_0", "logs/version_1", "logs/version_3"]
    assert [run.name for run in read_runs([logs / "version_2"])] == ["logs/version_2"]
    assert [run.name for run in read_runs([logs / "version_2", logs / "version_1"])] == [
        "logs/version_2", "logs/version_1",
    ]  # fmt: skip
    assert [run.name for run in read_runs([logs / "version_0", f"test={logs / 'version_2'}"])][1] == "test"


def test_a_run_that_has_trained_keeps_its_tests(logs: Path) -> None:
    one = trainer(logs)
    one.fit(LineWithTest(), DATA)
    [checkpoint] = (logs / "version_0").rglob("*.ckpt")
    one.test(ckpt_path=checkpoint, dataloaders=DATA, verbose=False)
    assert [run.name for run in read_runs([logs])] == ["logs/version_0", "logs/version_1", "logs/version_3"]


def test_the_file_names_each_checkpoint_once(tmp_path: Path) -> None:
    for _ in range(2):
        add_evaluated(tmp_path, "s3://bucket/a.ckpt")
    assert (tmp_path / EVALUATION_FILE).read_text().count("s3://bucket/a.ckpt") == 1
    add_evaluated(tmp_path, str(tmp_path / "b" / "c.ckpt"))
    assert '"b/c.ckpt"' in (tmp_path / EVALUATION_FILE).read_text()


@pytest.mark.parametrize("text", ['{"a": 1}\n{"a": 2}', "[1]", '{"checkpoints": "all"}'])
def test_a_file_of_another_program_is_left_alone(tmp_path: Path, text: str) -> None:
    (tmp_path / EVALUATION_FILE).write_text(text)
    with pytest.warns(UserWarning, match="seems to be another program's"):
        add_evaluated(tmp_path, "s3://bucket/a.ckpt")
    assert (tmp_path / EVALUATION_FILE).read_text() == text


def test_other_entries_of_the_file_stay(tmp_path: Path) -> None:
    (tmp_path / EVALUATION_FILE).write_text('{"accuracy": 0.5}')
    add_evaluated(tmp_path, "s3://bucket/a.ckpt")
    found = json.loads((tmp_path / EVALUATION_FILE).read_text())
    assert found == {"accuracy": 0.5, "checkpoints": ["s3://bucket/a.ckpt"]}
