"""Rows on their way from the Trainer to its loggers: on another thread, in order, once, whatever a logger does."""

from __future__ import annotations

import json
import resource
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import toys

import loopwright as lw
from loopwright.errors import ConfigError, MissingDependency
from loopwright.loggers import CSVLogger, JSONLinesLogger, Logger, TensorBoardLogger
from loopwright.trainer.metrics.log_output import LogOutput


class Recorder(Logger):
    """Keeps what it is told, and by which thread."""

    writes_behind = True

    def __init__(self, *, fails_at: int | None = None) -> None:
        self.rows: list[tuple[int, dict[str, Any]]] = []
        self.threads: set[threading.Thread] = set()
        self.ends: list[tuple[str, int]] = []
        self.fails_at = fails_at
        self.gate = threading.Event()
        self.gate.set()

    name = version = "recorder"

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        assert self.gate.wait(30)
        if self.fails_at is not None and len(self.rows) == self.fails_at:
            raise OSError("the service is gone")
        self.rows.append((step or 0, dict(metrics)))
        self.threads.add(threading.current_thread())

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        self.ends.append(("hparams", len(self.rows)))

    def finalize(self, status: str) -> None:
        self.ends.append((status, len(self.rows)))

    def state_dict(self) -> dict[str, Any]:
        return {"rows": len(self.rows)}


class Logging(toys.Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss)
        self.log("tokens", float(self.trainer.global_step * 100 + 100))
        return loss


class Validated(Logging):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))


def rows_of(logger: JSONLinesLogger) -> list[dict[str, Any]]:
    text = (Path(logger.log_dir) / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def test_a_fit_does_not_wait_for_its_logger_until_the_end() -> None:
    slow, seen = Recorder(), []

    class Look(lw.Callback):
        def on_train_end(self, *args: Any) -> None:
            seen.append(len(slow.rows))
            slow.gate.set()

    slow.gate.clear()
    toys.quiet(max_epochs=1, logger=slow, log_every_n_steps=1, callbacks=[Look()]).fit(toys.net(Logging), toys.loader())
    assert seen == [0]
    assert [step for step, row in slow.rows if "loss" in row] == [0, 1, 2, 3]
    assert slow.ends == [("success", len(slow.rows))]
    assert threading.current_thread() not in slow.threads


def test_a_logger_without_a_write_queue_is_called_on_the_trainers_thread() -> None:
    logger = Recorder()
    logger.writes_behind = False
    toys.quiet(max_epochs=1, logger=logger, log_every_n_steps=1).fit(toys.net(Logging), toys.loader())
    assert logger.threads == {threading.current_thread()}


def test_no_thread_is_left_after_fit() -> None:
    before = set(threading.enumerate())
    toys.quiet(max_epochs=1, logger=Recorder(), log_every_n_steps=1).fit(toys.net(Logging), toys.loader())
    assert not {thread for thread in set(threading.enumerate()) - before if thread.name == "write-behind"}


@pytest.mark.parametrize("behind", [True, False])
def test_a_logger_that_is_gone_changes_no_weights_and_its_rows_are_kept(tmp_path: Path, behind: bool) -> None:
    alone, watched, good, bad = toys.net(Logging), toys.net(Logging), Recorder(), Recorder(fails_at=2)
    bad.writes_behind = behind
    toys.quiet(max_epochs=2, log_every_n_steps=1).fit(alone, toys.loader())
    trainer = toys.quiet(max_epochs=2, logger=[bad, good], log_every_n_steps=1, default_root_dir=tmp_path)
    with pytest.warns(UserWarning, match="Recorder") as said:
        trainer.fit(watched, toys.loader())
    texts = [str(warning.message) for warning in said]
    assert texts == [
        "Recorder failed, and is tried again while its rows wait: OSError: the service is gone; training continues",
        f"Recorder did not accept 6 rows: they are in {tmp_path / 'unwritten_rows_Recorder.jsonl'}, as JSON lines",
    ]
    assert len(good.rows) == 8
    kept = [json.loads(line) for line in (tmp_path / "unwritten_rows_Recorder.jsonl").read_text().splitlines()]
    assert bad.rows + [(row.pop("step"), row) for row in kept] == good.rows
    toys.assert_same(alone, watched)


def test_a_full_disk_leaves_no_empty_file_of_rows(tmp_path: Path) -> None:
    trainer = toys.quiet(max_epochs=1, logger=Recorder(fails_at=0), log_every_n_steps=1, default_root_dir=tmp_path)
    module, loader, before = toys.net(Logging), toys.loader(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))  # a write raises OSError, as on a full disk
    try:
        with pytest.warns(UserWarning, match="Recorder") as said:
            trainer.fit(module, loader)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "and they could not be saved" in str(said[-1].message)
    assert not [*tmp_path.iterdir()]


class Shaky(Recorder):
    """Fails some times at a row, before or after it has taken it."""

    def __init__(self, where: str, error: Exception) -> None:
        super().__init__()
        self.where, self.error, self.left = where, error, 3

    def _shake(self, where: str, count: int) -> None:
        if where == self.where and count >= 2 and self.left:
            self.left -= 1
            raise self.error

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        self._shake("log", len(self.rows))
        super().log_metrics(metrics, step)

    def save(self) -> None:
        self._shake("save", len(self.rows))

    def finalize(self, status: str) -> None:
        self._shake("finalize", len(self.rows))
        super().finalize(status)


@pytest.mark.parametrize("behind", [True, False])
@pytest.mark.parametrize("where", ["log", "save", "finalize"])
def test_a_logger_that_recovers_has_each_row_once(where: str, behind: bool) -> None:
    good, shaky = Recorder(), Shaky(where, ConnectionError("reset"))
    shaky.writes_behind = behind
    with pytest.warns(UserWarning, match="Shaky failed, and is tried again") as said:
        toys.quiet(max_epochs=2, logger=[shaky, good], log_every_n_steps=1).fit(toys.net(Logging), toys.loader())
    assert len(said) == 1
    assert shaky.left == 0
    assert shaky.rows == good.rows
    assert shaky.ends == good.ends
    assert shaky.wall_s == good.wall_s


def test_a_row_that_a_logger_cannot_take_does_not_keep_it_from_the_others(tmp_path: Path) -> None:
    good, shaky = Recorder(), Shaky("log", ValueError("not finite"))
    trainer = toys.quiet(max_epochs=2, logger=[shaky, good], log_every_n_steps=1, default_root_dir=tmp_path)
    with pytest.warns(UserWarning, match="Shaky"):
        trainer.fit(toys.net(Logging), toys.loader())
    assert shaky.rows == [*good.rows[:2], *good.rows[5:]]
    assert len((tmp_path / "unwritten_rows_Shaky.jsonl").read_text().splitlines()) == 3


def test_a_logger_that_hangs_holds_neither_training_nor_a_checkpoint(tmp_path: Path) -> None:
    good, slow = Recorder(), Recorder()
    slow.gate.clear()

    class Impatient(lw.Callback):
        def on_train_batch_end(self, trainer: lw.Trainer, *args: Any) -> None:
            queue = trainer._lw_output._queues.get(id(slow))
            if queue is not None:
                queue.patience_s = 0.01

        def on_train_end(self, trainer: lw.Trainer, *args: Any) -> None:
            trainer.save_checkpoint(tmp_path / "a.ckpt")
            trainer._lw_output._queues[id(slow)].patience_s = 30
            slow.gate.set()

    trainer = toys.quiet(max_epochs=2, logger=[slow, good], log_every_n_steps=1, callbacks=[Impatient()])
    with pytest.warns(UserWarning, match=r"Recorder has not ended a write within 0\.01 s"):
        trainer.fit(toys.net(Logging), toys.loader())
    assert slow.rows == good.rows


def test_a_failure_at_the_last_row_is_said_too(tmp_path: Path) -> None:
    output = LogOutput(Recorder(fails_at=0), root=str(tmp_path), is_trial=False)
    output._is_running = True
    with pytest.warns(UserWarning, match="Recorder") as said:
        output.write({"a": 1.0}, 0), output.finalize("success")
    assert "the service is gone" in str(said[0].message)


def test_a_state_and_hyperparameters_come_after_the_rows_before_them() -> None:
    logger = Recorder()
    output = LogOutput(logger, root="", is_trial=False)
    output._is_running = True
    for step in range(50):
        output.write({"a": 1.0}, step)
    states: list[dict[str, Any]] = []
    output.tell(logger, lambda: states.append(logger.state_dict()))
    output.finalize("success")
    assert states == [{"rows": 50}]


def test_outside_of_a_run_rows_are_written_at_once() -> None:
    logger = Recorder()
    trainer = toys.quiet(logger=logger)
    trainer.log_metrics({"a": 1.0}, 3)
    assert logger.rows == [(3, {"a": 1.0})]


def test_what_the_user_writes_directly_comes_after_the_rows_before_it(tmp_path: Path) -> None:
    class Direct(Logging):
        def on_train_epoch_end(self) -> None:
            self.trainer.logger.experiment.write({"step": 99})

    logger = JSONLinesLogger(tmp_path)
    toys.quiet(max_epochs=2, logger=logger, log_every_n_steps=1).fit(toys.net(Direct), toys.loader())
    assert [row["step"] for row in rows_of(logger) if "loss" in row or row["step"] == 99] == [
        0,
        1,
        2,
        3,
        99,
        4,
        5,
        6,
        7,
        99,
    ]


def test_rows_say_samples_and_seconds(tmp_path: Path) -> None:
    logger = JSONLinesLogger(tmp_path)
    toys.quiet(max_epochs=2, logger=logger, log_every_n_steps=2).fit(toys.net(Logging), toys.loader(8, 2))
    rows = [row for row in rows_of(logger) if "loss" in row]
    assert [(row["step"], row["epoch"], row["samples"]) for row in rows] == [
        (1, 0, 4),
        (3, 0, 8),
        (5, 1, 12),
        (7, 1, 16),
    ]
    times = [row["wall_s"] for row in rows_of(logger)]
    assert times == sorted(times)
    assert 0 <= times[0] <= times[-1] < 60


@pytest.mark.parametrize(("axis", "places"), [("samples", [4, 8]), ("tokens", [200, 400]), ("step", [1, 3])])
def test_tensorboard_points_stand_where_the_axis_says(tmp_path: Path, axis: str, places: list[int]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = TensorBoardLogger(tmp_path, x_axis=axis)
    toys.quiet(max_epochs=1, logger=logger, log_every_n_steps=2).fit(toys.net(Logging), toys.loader(8, 2))
    accumulator = EventAccumulator(logger.log_dir)
    accumulator.Reload()
    assert [event.step for event in accumulator.Scalars("loss")] == places


def test_an_axis_that_is_never_logged_is_said_once(tmp_path: Path) -> None:
    logger = Recorder()
    logger.x_axis, logger.writes_behind = "words", False
    with pytest.warns(UserWarning, match="'words'") as said:
        toys.quiet(max_epochs=1, logger=logger, log_every_n_steps=1).fit(toys.net(Logging), toys.loader())
    assert len(said) == 1
    assert {step for step, _ in logger.rows} == {0}


class Breaks(lw.Callback):
    def on_train_batch_end(self, trainer: lw.Trainer, *args: Any) -> None:
        if trainer.global_step == 7:
            raise KeyError("machine lost")


def test_several_loggers_resume_with_the_points_of_an_uninterrupted_run(tmp_path: Path) -> None:
    def loggers(folder: str) -> list[Logger]:
        return [JSONLinesLogger(tmp_path / folder), CSVLogger(tmp_path / folder), TensorBoardLogger(tmp_path / folder)]

    def trainer(folder: str, *extra: lw.Callback) -> lw.Trainer:
        saving = lw.ModelCheckpoint(tmp_path / folder / "ckpt", save_top_k=-1, every_n_train_steps=3)
        return toys.quiet(
            max_epochs=3, logger=loggers(folder), log_every_n_steps=1, enable_checkpointing=True,
            callbacks=[saving, *extra],
        )  # fmt: skip

    whole, broken, resumed = trainer("a"), trainer("b", Breaks()), trainer("b")
    data = {"train_dataloaders": toys.loader(), "val_dataloaders": toys.loader(seed=3)}
    whole.fit(toys.net(Validated), **data)
    with pytest.raises(KeyError):
        broken.fit(toys.net(Validated), **data)
    (newest,) = (tmp_path / "b" / "ckpt").glob("*step=6.ckpt")
    resumed.fit(toys.net(Validated), ckpt_path=newest, **data)
    timeless = [
        [{key: value for key, value in row.items() if key != "wall_s"} for row in rows_of(run.loggers[0])]
        for run in (whole, resumed)
    ]
    assert timeless[0] == timeless[1]
    assert len(timeless[0]) == 12 + 3
    csvs = [(Path(run.loggers[1].log_dir) / "metrics.csv").read_bytes() for run in (whole, resumed)]
    assert csvs[0] == csvs[1]
    times = [row["wall_s"] for row in rows_of(resumed.loggers[0])]
    assert times == sorted(times)
    assert torch.equal(*(run.lightning_module.net[0].weight for run in (whole, resumed)))


@pytest.mark.parametrize(
    ("name", "expected"),
    [("csv", "CSVLogger"), ("TensorBoard", "TensorBoardLogger"), ("json-lines", "JSONLinesLogger"), ("CSVLogger",) * 2],
)
def test_a_logger_may_be_named(name: str, expected: str, tmp_path: Path) -> None:
    trainer = lw.Trainer(logger=name, default_root_dir=tmp_path, accelerator="cpu")
    assert type(trainer.logger).__name__ == expected
    assert trainer.log_dir is not None
    assert trainer.log_dir.startswith(str(tmp_path))


def test_names_and_loggers_may_stand_in_one_list(tmp_path: Path) -> None:
    trainer = lw.Trainer(logger=["csv", CSVLogger(tmp_path)], default_root_dir=tmp_path, accelerator="cpu")
    assert [type(one).__name__ for one in trainer.loggers] == ["CSVLogger", "CSVLogger"]


def test_another_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"got logger='tensorbord' \(did you mean 'tensorboard'"):
        lw.Trainer(logger="tensorbord", accelerator="cpu")


def test_without_tensorboard_the_default_is_csv_with_a_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr("loopwright.loggers.tensorboard.find_spec", lambda name: None)
    trainer = lw.Trainer(default_root_dir=tmp_path)
    assert [type(logger) for logger in trainer.loggers] == [lw.CSVLogger]
    assert [record.message for record in caplog.records if "tensorboard is not installed" in record.message]
    with pytest.raises(MissingDependency):
        lw.Trainer(logger="tensorboard")
