"""Preemption: each kind of notice saves the run, ends it with 143, and lets it go on exactly."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from toys import ValidatedNet, assert_same, loader, momentum, net

import loopwright as lw
from loopwright.callbacks import Preemption
from loopwright.errors import ConfigError


class Acts(lw.Callback):
    """Does something at a step, and waits until the run has heard of it."""

    def __init__(self, step: int, act: Callable[[], Any]) -> None:
        self.step, self.act = step, act

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.step:
            self.act()
            ends = time.monotonic() + 120
            while trainer.run_signals.requested is None and time.monotonic() < ends:
                time.sleep(0.001)


def fit(
    root: Path, *callbacks: lw.Callback, ckpt_path: str | None = None, dirpath: Path | None = None, **kwargs: Any
) -> Any:
    module = net(ValidatedNet, momentum, dropout=0.3)
    trainer = lw.Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=root, max_epochs=2, callbacks=[lw.ModelCheckpoint(dirpath, save_top_k=0), *callbacks],
        **kwargs,
    )  # fmt: skip
    trainer.fit(module, loader(8, 2, shuffle=True), loader(4, seed=3), ckpt_path=ckpt_path)
    return module


@pytest.mark.parametrize("notice", ["SIGUSR1", "SIGTERM", "SIGUSR2", "file", "function"])
def test_a_notice_saves_the_run_which_goes_on_exactly(notice: str, tmp_path: Path, caplog: Any) -> None:
    whole = fit(tmp_path / "whole")
    file, answers = tmp_path / "notice", [False]
    preemption = Preemption(
        signals=["SIGUSR1", signal.SIGUSR2], notice_file=file, is_noticed=lambda: answers[0], poll_s=0.005, grace_s=60
    )
    acts: dict[str, Callable[[], Any]] = {"file": file.touch, "function": lambda: answers.__setitem__(0, True)}
    act = acts.get(notice) or (lambda: os.kill(os.getpid(), getattr(signal, notice)))
    with pytest.raises(lw.StopBySignal) as stopped:
        fit(tmp_path / "run", Acts(5, act), preemption)
    assert stopped.value.code == 143
    assert (tmp_path / "run" / "checkpoints" / "preempted.ckpt").exists()
    assert re.search(r"at step 6, \d+\.\d+ s of 60 s after the notice\.", caplog.text)
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
    file.unlink(missing_ok=True)
    assert_same(fit(tmp_path / "run", Preemption(), ckpt_path="last"), whole)


def test_it_saves_where_the_last_checkpoint_is_looked_for(tmp_path: Path) -> None:
    whole = fit(tmp_path / "whole")
    with pytest.raises(lw.StopBySignal):
        fit(
            tmp_path,
            Acts(5, lambda: os.kill(os.getpid(), signal.SIGTERM)),
            Preemption(),
            dirpath=tmp_path / "own",
        )
    assert (tmp_path / "own" / "preempted.ckpt").exists()
    assert_same(fit(tmp_path, Preemption(), ckpt_path="last", dirpath=tmp_path / "own"), whole)


def test_too_short_a_grace_is_said(tmp_path: Path, caplog: Any) -> None:
    with pytest.raises(lw.StopBySignal):
        fit(tmp_path, Acts(1, lambda: os.kill(os.getpid(), signal.SIGTERM)), Preemption(tmp_path / "x", grace_s=1e-6))
    assert "That was too long" in caplog.text
    assert (tmp_path / "x" / "preempted.ckpt").exists()


def test_a_question_that_fails_is_asked_again(tmp_path: Path, caplog: Any) -> None:
    asked: list[int] = []

    def ask() -> bool:
        asked.append(1)
        if len(asked) < 3:
            raise OSError("no service")
        return True

    with pytest.raises(lw.StopBySignal):
        fit(tmp_path, Acts(0, lambda: None), Preemption(is_noticed=ask, poll_s=0.005))
    assert caplog.text.count("is_noticed failed and is called again: OSError: no service") == 1


def test_nothing_stays_after_a_fit_that_was_left_alone(tmp_path: Path) -> None:
    import threading

    fit(tmp_path, Preemption(notice_file=tmp_path / "notice", poll_s=0.005))
    time.sleep(0.02)
    assert not [thread for thread in threading.enumerate() if "preemption" in thread.name]
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
    assert not list(tmp_path.rglob("preempted*"))


def test_a_signal_that_the_program_handles_stays_with_it(tmp_path: Path, caplog: Any) -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: heard.append(number))
    try:
        fit(tmp_path, LateSignal(), Preemption())
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert heard == [signal.SIGUSR1]
    assert "the program has a handler for SIGUSR1, which is kept" in caplog.text


class LateSignal(lw.Callback):
    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 1:
            os.kill(os.getpid(), signal.SIGUSR1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"signals": ["SIGUSR"]}, "'SIGUSR' is not a signal.*did you mean 'SIGUSR"),
        ({"signals": ["SIGKILL"]}, "SIGKILL cannot be a notice"),
        ({"poll_s": 0}, "poll_s=0"),
        ({"filename": ""}, "filename=''"),
        ({"is_noticed": True}, "is_noticed is bool, expected a function"),
    ],
)
def test_arguments_that_cannot_work_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Preemption(**arguments)
