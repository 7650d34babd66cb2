"""OnExceptionCheckpoint: a failed fit can be gone on with, a successful one leaves nothing behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from toys import ValidatedNet, assert_same, loader, momentum, net
from toys import quiet as silent

import loopwright as lw
from loopwright.callbacks import OnExceptionCheckpoint
from loopwright.errors import ConfigError


def quiet(**kwargs: Any) -> lw.Trainer:
    return silent(enable_checkpointing=True, **kwargs)


class FailsAt(lw.Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        if trainer.global_step == self.step:
            self.step = -1
            raise OSError("broken")


def test_a_run_that_failed_in_an_epoch_goes_on_exactly_and_the_file_goes(tmp_path: Path) -> None:
    whole = net(ValidatedNet, momentum)
    silent(max_epochs=2).fit(whole, loader(8, 2, shuffle=True), loader(4, seed=3))
    checkpoint = OnExceptionCheckpoint(tmp_path / "new")
    with pytest.raises(OSError, match="broken"):
        quiet(max_epochs=2, callbacks=[checkpoint, FailsAt(6)]).fit(
            net(ValidatedNet, momentum), loader(8, 2, shuffle=True), loader(4, seed=3)
        )
    assert checkpoint.ckpt_path == str(tmp_path / "new" / "on_exception.ckpt")
    assert Path(checkpoint.ckpt_path).exists()
    again = net(ValidatedNet, momentum, seed=9)
    trainer = quiet(max_epochs=2, callbacks=[checkpoint])
    trainer.validate(again, loader(4), verbose=False)
    assert Path(checkpoint.ckpt_path).exists()  # an evaluation is no training that succeeded
    trainer.fit(again, loader(8, 2, shuffle=True), loader(4, seed=3), ckpt_path=checkpoint.ckpt_path)
    assert_same(again, whole)
    assert not Path(checkpoint.ckpt_path).exists()


def test_a_trial_run_saves_and_removes_nothing(tmp_path: Path) -> None:
    checkpoint = OnExceptionCheckpoint(tmp_path)
    Path(checkpoint.ckpt_path).touch()
    with pytest.raises(OSError, match="broken"):
        quiet(fast_dev_run=True, callbacks=[checkpoint, FailsAt(0)]).fit(net(), loader())
    assert Path(checkpoint.ckpt_path).read_bytes() == b""


def test_a_save_that_fails_does_not_hide_the_error(tmp_path: Path, caplog: Any) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="broken"):
        quiet(max_epochs=1, callbacks=[OnExceptionCheckpoint(tmp_path / "file"), FailsAt(2)]).fit(net(), loader())
    assert "nothing could be saved on OSError" in caplog.text


def test_an_empty_name_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="filename is empty"):
        OnExceptionCheckpoint(tmp_path, "")
