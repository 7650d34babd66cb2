"""ModelCheckpoint and the Trainer with AsyncCheckpointIO: nothing that follows a file comes before it is complete."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from toys import ValidatedNet, assert_same, loader, momentum, net
from toys import quiet as silent

import loopwright as lw
from loopwright.callbacks import Callback, ModelCheckpoint, OnExceptionCheckpoint, Preemption
from loopwright.checkpoint import TorchCheckpointIO, verify
from loopwright.errors import CheckpointError, StopBySignal
from loopwright.loggers import Logger


class Gated(TorchCheckpointIO):
    """Writes when the gate is open, and fails at the saves that are named."""

    def __init__(self, *, fails_at: str = "", is_open: bool = True) -> None:
        self.gate = threading.Event()
        self.fails_at = fails_at
        if is_open:
            self.gate.set()

    def finish(self) -> None:
        """Open the gate, and wait for the thread that writes; what it met is not looked at."""
        self.gate.set()
        for thread in threading.enumerate():
            if thread.name == "loopwright-checkpoint":
                thread.join(30)

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None, **options: Any) -> None:
        assert self.gate.wait(30)
        if self.fails_at and self.fails_at in Path(path).name:
            raise CheckpointError("disk full", fix="free space")
        super().save_checkpoint(checkpoint, path, storage_options)


class At(Callback):
    """Calls something when a step is done, after its checkpoints."""

    runs_last = True

    def __init__(self, actions: dict[int, Any]) -> None:
        self.actions = actions
        self.last_step = 0

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step != self.last_step:
            self.last_step = trainer.global_step
            if self.last_step in self.actions:
                self.actions[self.last_step]()


class Noting(Logger):
    """Notes which files were there when it was told of a save."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.told = folder, []
        self.told: list[tuple[str, bool]]

    name = version = "x"

    def log_metrics(self, metrics: Any, step: Any = None) -> None: ...

    def log_hyperparams(self, params: Any) -> None: ...

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        best = checkpoint_callback.best_model_path
        self.told.append((Path(best).name, os.path.exists(best)))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def quiet(plugin: Any, *callbacks: Any, **kwargs: Any) -> lw.Trainer:
    return silent(enable_checkpointing=True, callbacks=list(callbacks), plugins=plugin, **kwargs)


def content(folder: Path) -> dict[str, Any]:
    """Return what a run left: of each file its step, its books, and whether it is a link."""
    found: dict[str, Any] = {}
    for path in folder.iterdir():
        loaded = torch.load(path, weights_only=True)
        books = [repr(state) for key, state in loaded["callbacks"].items() if "ModelCheckpoint" in key]
        found[path.name] = (loaded["global_step"], path.is_symlink(), books)
    return found


@pytest.mark.parametrize(
    "options",
    [
        {"save_last": True, "every_n_train_steps": 2},
        {"save_last": "link", "monitor": "val_loss", "save_top_k": 2},
        {"save_last": True, "monitor": "val_loss", "mode": "max", "every_n_train_steps": 3},
        {"save_top_k": 0, "save_last": True, "every_n_train_steps": 3},
        {"save_top_k": -1, "filename": "{step}"},
    ],
)
def test_files_and_books_are_those_of_a_run_that_waits_for_each_save(options: dict[str, Any], tmp_path: Path) -> None:
    left = []
    for plugin in (None, lw.AsyncCheckpointIO()):
        folder = tmp_path / "files"
        checkpoint = ModelCheckpoint(folder, **options)
        module = net(ValidatedNet, momentum)
        trainer = quiet(plugin, checkpoint, max_epochs=3)
        trainer.fit(module, loader(10, 2, shuffle=True), loader(4, seed=3))
        left.append((content(folder), repr(checkpoint.state_dict()), checkpoint.last_model_path))
        assert all(verify(path).sealed for path in folder.iterdir())
        assert trainer._lw_saving.is_in_background == (plugin is not None)
        folder.rename(tmp_path / f"{plugin is None}")  # paths are a part of the state: both runs use the same
    assert left[0] == left[1]


@pytest.mark.parametrize("save_last", [True, "link"])
def test_what_follows_a_save_waits_until_the_file_is_complete(save_last: Any, tmp_path: Path) -> None:
    inner = Gated()
    logger = Noting(tmp_path)
    checkpoint = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=2, save_last=save_last)
    seen: dict[str, Any] = {}

    def settle_then_close() -> None:
        trainer.wait_for_save()
        seen["first"] = (names(tmp_path), list(logger.told))
        inner.gate.clear()

    def look_then_open() -> None:
        seen["while"] = (names(tmp_path), list(logger.told), Path(checkpoint.best_model_path).name)
        seen["last"] = torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"]
        inner.gate.set()
        trainer.wait_for_save()
        seen["after"] = names(tmp_path)

    trainer = quiet(
        lw.AsyncCheckpointIO(inner), checkpoint, At({3: settle_then_close, 5: look_then_open}), max_epochs=1,
        logger=logger,
    )  # fmt: skip
    trainer.fit(net(), loader(12, 2))
    assert seen["first"][0] == ["last.ckpt", "step=2.ckpt"]
    assert seen["first"][1][0] == ("step=2.ckpt", True)
    assert seen["while"] == (*seen["first"], "step=4.ckpt")  # it is named, and nothing else has changed
    assert seen["last"] == 2
    assert seen["after"] == ["last.ckpt", "step=4.ckpt"]
    assert names(tmp_path) == ["last.ckpt", "step=6.ckpt"]
    assert all(is_there for _, is_there in logger.told)
    assert len(logger.told) == (6 if save_last is True else 3)


def test_weights_are_those_of_the_step_and_a_resumed_run_is_the_same_bit_for_bit(tmp_path: Path) -> None:
    def data() -> tuple[Any, Any]:
        return loader(16, 2, shuffle=True), loader(4, seed=3)

    whole = net(ValidatedNet, momentum, dropout=0.2, norm=True)
    silent(max_epochs=2).fit(whole, *data())
    ends = []
    for plugin in (None, lw.AsyncCheckpointIO()):
        folder = tmp_path / str(plugin is None)
        checkpoint = ModelCheckpoint(folder, "{step}", every_n_train_steps=5, save_top_k=-1)
        trainer = quiet(plugin, checkpoint, max_epochs=2)
        trainer.fit(net(ValidatedNet, momentum, dropout=0.2, norm=True), *data())
        again = net(ValidatedNet, momentum, seed=8, dropout=0.2, norm=True)
        trainer = quiet(plugin, max_epochs=2, default_root_dir=folder)
        trainer.fit(again, *data(), ckpt_path=folder / "step=5.ckpt")
        assert_same(again, whole)
        ends.append(torch.load(folder / "step=5.ckpt", weights_only=True))
    assert_same(ends[0]["state_dict"], ends[1]["state_dict"])
    assert repr(ends[0]["optimizer_states"]) == repr(ends[1]["optimizer_states"])


def test_a_failure_ends_training_at_the_next_step_and_costs_no_file(tmp_path: Path) -> None:
    inner = Gated(fails_at="step=4")
    checkpoint = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=2, save_last="link")
    trainer = quiet(
        lw.AsyncCheckpointIO(inner), checkpoint, At({3: inner.gate.clear, 4: inner.finish}), max_epochs=1,
    )  # fmt: skip
    with pytest.raises(CheckpointError, match="disk full") as caught:
        trainer.fit(net(), loader(40, 2))
    assert trainer.global_step == 5  # not at the next save, which is at 6
    assert "step=4.ckpt' was saved in the background" in caught.value.__notes__[0]
    assert names(tmp_path) == ["last.ckpt", "step=2.ckpt"]
    assert (tmp_path / "last.ckpt").resolve().name == "step=2.ckpt"
    assert Path(checkpoint.best_model_path).name == "step=2.ckpt"
    assert trainer.interrupted
    # The same Trainer goes on; nothing of the failure is left.
    inner.fails_at = ""
    trainer.fit(net(), loader(40, 2), ckpt_path="last")
    assert trainer.global_step == 20
    assert names(tmp_path) == ["last.ckpt", "step=20.ckpt"]


@pytest.mark.parametrize("hook", ["on_train_end", "on_fit_end", "teardown"])
def test_no_verb_returns_before_its_last_save_is_complete_or_raised(hook: str, tmp_path: Path) -> None:
    class Saves(Callback):
        def save(self, trainer: Any, *_: Any) -> None:
            trainer.save_checkpoint(tmp_path / "own.ckpt")
            assert not (tmp_path / "own.ckpt").exists()
            inner.gate.set()

    setattr(Saves, hook, lambda self, trainer, *rest: self.save(trainer))
    inner = Gated(is_open=False)
    trainer = quiet(lw.AsyncCheckpointIO(inner), Saves(), enable_model_summary=False, max_steps=2)
    trainer.callbacks = [callback for callback in trainer.callbacks if not isinstance(callback, ModelCheckpoint)]
    data = loader()
    trainer.fit(net(), data)
    assert verify(tmp_path / "own.ckpt").sealed

    inner.fails_at = "own"
    inner.gate.clear()
    (tmp_path / "own.ckpt").unlink()
    with pytest.raises(CheckpointError, match="disk full"):
        trainer.fit(net(), data)
    assert trainer.interrupted
    # Outside of a run there is no training to go on with: the call itself waits.
    inner.fails_at = ""
    trainer.save_checkpoint(tmp_path / "final.ckpt")
    assert verify(tmp_path / "final.ckpt").sealed
    inner.fails_at = "final"
    with pytest.raises(CheckpointError, match="disk full"):
        trainer.save_checkpoint(tmp_path / "final.ckpt")


def test_an_error_of_training_stays_the_one_that_is_raised(tmp_path: Path, caplog: Any) -> None:
    inner = Gated(fails_at="step=2", is_open=False)

    def fail() -> None:
        inner.gate.set()
        raise ValueError("own")

    checkpoint = ModelCheckpoint(tmp_path / "c", "{step}", every_n_train_steps=1, save_on_exception=True)
    late = OnExceptionCheckpoint(tmp_path / "late")
    inner.gate.set()
    trainer = quiet(
        lw.AsyncCheckpointIO(inner), checkpoint, late,
        At({1: lambda: (trainer.wait_for_save(), inner.gate.clear()), 2: fail}), max_epochs=1,
    )  # fmt: skip
    with pytest.raises(ValueError, match="own") as caught:
        trainer.fit(net(), loader())
    assert any("a save in the background had failed: CheckpointError: disk full" in n for n in caught.value.__notes__)
    assert "besides ValueError" in caplog.text
    assert Path(checkpoint.best_model_path).name == "step=1.ckpt"
    # The file of step 2 is not there, so that the one of the exception is not in vain; it would fail, too.
    assert names(tmp_path / "c") == ["step=1.ckpt"]
    assert verify(late.ckpt_path).sealed

    inner.fails_at = "on_exception"
    with pytest.raises(ValueError, match="own"):
        quiet(lw.AsyncCheckpointIO(inner), late, At({1: fail})).fit(net(), loader())
    assert "OnExceptionCheckpoint: nothing could be saved on ValueError" in caplog.text


def test_a_notice_that_the_machine_goes_is_answered_when_the_file_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = quiet(
        lw.AsyncCheckpointIO(Gated()), Preemption(tmp_path), ModelCheckpoint(tmp_path / "c", every_n_train_steps=1),
        At({3: lambda: os.kill(os.getpid(), signal.SIGTERM)}), max_epochs=1,
    )  # fmt: skip
    said = []
    report = Preemption._lw_report

    def reported(self: Preemption, path: str, *rest: Any) -> None:
        said.append(verify(path).sealed)
        report(self, path, *rest)

    monkeypatch.setattr(Preemption, "_lw_report", reported)
    with pytest.raises(StopBySignal):
        trainer.fit(net(), loader(16, 2))
    assert said == [True]
    assert names(tmp_path / "c") == ["epoch=0-step=4.ckpt"]
