"""The lines with which a fit begins and ends."""

from __future__ import annotations

import json
import logging
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import loopwright as lw
from loopwright.errors import RankFailure
from loopwright.trainer import fit_lines


class Net(lw.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = self.layer(batch).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Interrupted(Net):
    def on_train_batch_end(self, outputs: object, batch: object, batch_idx: int) -> None:
        os.kill(os.getpid(), signal.SIGINT)


def fit(folder: Path, module: lw.Module | None = None, **arguments: Any) -> lw.Trainer:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False}
    trainer = lw.Trainer(**{"max_epochs": 1, "default_root_dir": folder, **quiet, **arguments})
    trainer.fit(module or Net(), DataLoader(torch.ones(6, 4), batch_size=2), DataLoader(torch.ones(2, 4)))
    return trainer


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.name.endswith("fit_lines")]


@pytest.fixture(autouse=True)
def _information(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "loopwright")


@pytest.fixture(autouse=True)
def _no_validation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Net, "validation_step", lambda *_: None, raising=False)


def test_a_fit_begins_with_what_it_runs_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lw.seed_everything(7)
    fit(tmp_path, accelerator="cpu")
    assert lines(caplog)[0] == ("Training on cpu, 1 rank, SingleDeviceStrategy, precision 32-true, seed 7.")


def test_a_fit_ends_with_three_lines(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(fit_lines.shutil, "which", lambda name: f"/bin/{name}")
    keep = lw.ModelCheckpoint(monitor="loss", save_last=True)
    fit(tmp_path, callbacks=[keep], log_every_n_steps=1)
    why, where, logs = lines(caplog)[1:]
    assert why.startswith("Training ended after 1 epoch, 3 steps, 0:00:0")
    assert why.endswith(": max_epochs=1 is reached.")
    folder = os.path.join("loopwright_logs", "version_0")
    score = f"{float(keep.best_model_score or 0):.4g}"
    checkpoints = os.path.join(folder, "checkpoints")
    assert where.split("\n  ") == [
        "Checkpoints:",
        f"best {os.path.join(checkpoints, 'epoch=0-step=3.ckpt')} (loss = {score})",
        f"last {os.path.join(checkpoints, 'last.ckpt')}",
    ]
    assert logs == f"Logs: {folder}\n  page of curves: loopwright report {folder}"
    assert max(map(len, "\n".join((why, where, logs)).splitlines())) <= 80


def test_an_evaluation_says_where_its_metrics_are_unless_a_line_before_does(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Tested(Net):
        def test_step(self, batch: torch.Tensor, batch_idx: int) -> None:
            self.log("size", float(len(batch)))

        def predict_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            return self.layer(batch)

    trainer = lw.Trainer(default_root_dir=tmp_path, enable_progress_bar=False)
    trainer.predict(Tested(), DataLoader(torch.ones(2, 4)))
    assert lines(caplog) == []
    trainer.test(Tested(), DataLoader(torch.ones(2, 4)))
    trainer.test(Tested(), DataLoader(torch.ones(2, 4)))
    assert lines(caplog) == [f"Logs: {trainer.log_dir}"]
    fitted = fit(tmp_path, Tested())
    count = len(lines(caplog))
    fitted.test(Tested(), DataLoader(torch.ones(2, 4)))
    assert len(lines(caplog)) == count


def test_the_command_for_a_page_of_curves_runs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("plotly")
    monkeypatch.chdir(tmp_path)  # the command is for the folder that the program ran in
    fit(tmp_path, log_every_n_steps=1)
    command = lines(caplog)[-1].partition("page of curves: ")[2]
    done = subprocess.run(shlex.split(command), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "report.html").is_file()


def test_without_metrics_no_page_of_curves_is_offered(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Silent(Net):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            return self.layer(batch).square().mean()

    seldom = fit(tmp_path, enable_checkpointing=False)
    assert lines(caplog)[-1] == f"Logs: {seldom.log_dir} (no metrics: log_every_n_steps=50)"
    trainer = fit(tmp_path, Silent(), enable_checkpointing=False)
    assert lines(caplog)[-1] == f"Logs: {trainer.log_dir} (no metrics: nothing called self.log)"


def test_the_end_names_what_is_not_finite(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Net):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            return super().training_step(batch, batch_idx) * (float("nan") if batch_idx else 1.0)

        def on_train_batch_end(self, outputs: object, batch: object, batch_idx: int) -> None:
            self.log("weight", self.layer.weight.sum())

    with pytest.warns(UserWarning, match="nan at batch 1"):
        fit(tmp_path, Broken(), logger=False, enable_checkpointing=False)
    values, first = next(line for line in lines(caplog) if line.startswith("Not finite")).split("; ")
    assert values == "Not finite: the last values are loss = nan, weight = nan"
    assert first.startswith("the training loss was nan first at batch 1 ")


def test_a_fit_that_is_finite_names_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fit(tmp_path, logger=False, enable_checkpointing=False)
    assert not [line for line in lines(caplog) if line.startswith("Not finite")]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"max_steps": 2}, "max_steps=2 is reached"),
        ({"max_samples": 4}, "max_samples=4 is reached"),
        ({"fast_dev_run": True}, "fast_dev_run, a trial that saves nothing"),
        ({"max_time": {"seconds": 0}}, "Timer, the time limit of 0:00:00 is reached"),
    ],
)
def test_the_end_says_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, arguments: dict[str, Any], why: str
) -> None:
    fit(tmp_path, logger=False, enable_checkpointing=False, **arguments)
    ended = next(line.replace("\n ", "") for line in lines(caplog) if line.startswith("Training ended"))
    assert ended.endswith(f": {why}.")


def test_early_stopping_is_named_with_its_reason(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stop = lw.EarlyStopping("loss", stopping_threshold=1e9)
    fit(tmp_path, max_epochs=5, callbacks=[stop], logger=False, enable_checkpointing=False)
    ended = next(line for line in lines(caplog) if line.startswith("Training ended"))
    head, why = ended.split("\n  ")  # a line of its own, where one would be broken by a terminal
    assert head.endswith(":")
    assert why.startswith("EarlyStopping, loss = ")
    assert "reached stopping_threshold" in ended


def test_a_request_without_a_reason_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Stops(lw.Callback):
        def on_train_batch_end(self, trainer: lw.Trainer, *_: Any) -> None:
            trainer.should_stop = True

    fit(tmp_path, callbacks=[Stops()], logger=False, enable_checkpointing=False)
    assert "trainer.should_stop was set." in next(line for line in lines(caplog) if line.startswith("Training ended"))


def test_where_there_are_neither_checkpoints_nor_logs_it_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fit(tmp_path, logger=False, enable_checkpointing=False)
    assert lines(caplog)[-2:] == ["Checkpoints: none (no ModelCheckpoint).", "Logs: none (no logger)."]


def test_barebones_says_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = lw.Trainer(max_steps=2, barebones=True, default_root_dir=tmp_path)
    trainer.fit(Net(), DataLoader(torch.ones(6, 4), batch_size=2), DataLoader(torch.ones(2, 4)))
    assert not lines(caplog)


@pytest.mark.parametrize("saves", [False, True])
def test_an_interruption_says_in_one_line_whether_it_saved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, *, saves: bool
) -> None:
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path, Interrupted(), callbacks=[lw.ModelCheckpoint(tmp_path / "kept", save_on_exception=saves)])
    (line,) = lines(caplog)[1:]
    first, *rest = line.split("\n  ")
    assert first == "fit was interrupted between two steps, in epoch 0, after 1 step:"
    if saves:
        kept = tmp_path / "kept" / "epoch=0-step=1.ckpt"
        assert rest == [f"saved in {kept};", "continue with trainer.fit(..., ckpt_path='last')"]
    else:
        assert rest == ["nothing was saved;", "add ModelCheckpoint(save_on_exception=True)"]


def test_an_interruption_keeps_the_timeline(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path, Interrupted(), logger=lw.CSVLogger(tmp_path, name=None, version=""))
    saved = json.loads((tmp_path / "timeline.json").read_text())
    assert saved["seconds"]["forward"] > 0
    assert saved["num_steps"] == 1
    assert (tmp_path / "environment.json").is_file()


def test_an_interruption_without_a_save_names_the_last_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class InterruptedLater(lw.Callback):
        def on_train_batch_end(self, trainer: lw.Trainer, *_: Any) -> None:
            if trainer.global_step == 4:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path, callbacks=[lw.ModelCheckpoint(tmp_path / "kept"), InterruptedLater()], max_epochs=2)
    kept = tmp_path / "kept" / "epoch=0-step=3.ckpt"
    expected = [
        "nothing was saved;",
        f"continue from the last checkpoint with trainer.fit(..., ckpt_path={str(kept)!r})",
    ]
    assert lines(caplog)[-1].split("\n  ")[1:] == expected


def test_an_interruption_without_a_save_names_the_last_of_several_checkpoints(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Scored(Net):
        def on_train_batch_end(self, outputs: object, batch: object, batch_idx: int) -> None:
            self.log("worse", float(self.global_step))
            if self.global_step == 7:
                raise KeyboardInterrupt

    kept = lw.ModelCheckpoint(tmp_path / "kept", monitor="worse", save_last=True)
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path, Scored(), callbacks=[kept], max_epochs=3)
    assert kept.best_model_path.endswith("step=3.ckpt")
    assert lines(caplog)[-1].endswith(f"ckpt_path={str(tmp_path / 'kept' / 'last.ckpt')!r})")


class Empty:
    def __iter__(self) -> Any:
        return iter(())


def test_data_without_batches_is_warned_of_at_the_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False}
    trainer = lw.Trainer(max_epochs=1, default_root_dir=tmp_path, **quiet)  # type: ignore[arg-type]
    with pytest.warns(UserWarning, match="has no batches in epoch 0"):
        trainer.fit(Net(), Empty(), DataLoader(torch.ones(2, 4)))
    assert "Nothing was trained: the training data has no batches." in lines(caplog)


def test_manual_optimization_that_steps_nothing_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Idle(Net):
        automatic_optimization = False

    fit(tmp_path, Idle())
    assert any(one.startswith("No optimizer was stepped") for one in lines(caplog))


def test_manual_optimization_that_steps_says_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Stepping(Net):
        automatic_optimization = False

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            optimizer = self.optimizers()
            loss = super().training_step(batch, batch_idx)
            self.manual_backward(loss)
            optimizer.step()
            return loss

    fit(tmp_path, Stepping())
    assert not any(one.startswith("No optimizer") for one in lines(caplog))


def test_the_failure_of_another_rank_of_this_machine_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit_lines.socket, "gethostname", lambda: "here")
    trace = "--- traceback of rank 1 ---\nTraceback (most recent call last):\nValueError: x"
    near = RankFailure(f"rank 1 (host here, pid 5) failed: ValueError: x\n{trace}", fix="look.")
    far = RankFailure(f"rank 1 (host there, pid 5) failed: ValueError: x\n{trace}", fix="look.")
    # It printed nothing itself.
    crashed = RankFailure("rank 1 (host here, pid 5) failed: SIGSEGV\n--- traceback of rank 1 ---\nFatal", fix="look.")
    trainer = lw.Trainer(logger=False, enable_progress_bar=False)
    for error in (near, far, crashed):
        fit_lines.tell_failure(trainer, error)
    assert vars(near)["_loopwright_line"] == "rank 0 stops: rank 1 (host here, pid 5) failed: ValueError: x"
    assert "_loopwright_line" not in vars(far)
    assert "_loopwright_line" not in vars(crashed)


def test_resuming_names_the_file_and_where_it_continues(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "a.ckpt"
    fit(tmp_path, logger=False).save_checkpoint(path)
    trainer = lw.Trainer(
        max_epochs=2, logger=False, enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path
    )
    trainer.fit(Net(), DataLoader(torch.ones(6, 4), batch_size=2), DataLoader(torch.ones(2, 4)), ckpt_path=path)
    assert f"Resuming at epoch 1, step 3 from {path}." in [one.getMessage() for one in caplog.records]


def test_the_default_number_of_epochs_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Short(Net):
        def on_train_epoch_end(self) -> None:
            self.trainer.progress.epochs += 900

    fit(tmp_path, Short(), max_epochs=None, logger=False, enable_checkpointing=False)
    told = lines(caplog)
    assert "No limit was set: training ends after max_epochs=1000, the default." in told
    assert any("max_epochs=1000, the default, is reached" in one for one in told)


def test_no_default_is_named_where_steps_are_limited(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fit(tmp_path, max_epochs=None, max_steps=2, logger=False, enable_checkpointing=False)
    assert not any("default" in one for one in lines(caplog))


@pytest.mark.parametrize(("name", "error"), [("SIGINT", KeyboardInterrupt), ("SIGTERM", SystemExit)])
@pytest.mark.parametrize("hook", ["on_fit_end", "teardown"])
def test_a_signal_after_the_last_step_is_not_lost(
    hook: str, name: str, error: type[BaseException], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Late(Net):
        pass

    setattr(Late, hook, lambda *_: os.kill(os.getpid(), signal.Signals[name]))
    module, before = Late(), signal.getsignal(signal.Signals[name])
    with pytest.raises(error):
        fit(tmp_path, module)
    assert signal.getsignal(signal.Signals[name]) is before
    assert any("max_epochs=1 is reached" in one for one in lines(caplog))
    assert list(tmp_path.rglob("*.ckpt"))
    assert f"{name} arrived after the last step: fit is complete" in caplog.text


@pytest.mark.parametrize("bar", [lw.TQDMProgressBar, lw.RichProgressBar])
def test_a_program_without_a_console_trains(
    bar: type[lw.Callback], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    shown: dict[str, Any] = {"enable_progress_bar": True, "enable_model_summary": True, "logger": False}
    trainer = fit(tmp_path, callbacks=[bar()], **shown)
    trainer.print("without a console")
    trainer.validate(Net(), DataLoader(torch.ones(2, 4)))
    assert trainer.global_step == 3
