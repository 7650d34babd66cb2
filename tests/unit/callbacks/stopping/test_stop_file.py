"""StopFile: a file ends training in good order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from toys import Recorder, loader, net, quiet

import loopwright as lw
from loopwright.callbacks import StopFile
from loopwright.errors import ConfigError


class Touches(lw.Callback):
    def __init__(self, path: Path, step: int) -> None:
        self.path, self.step = path, step

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.step:
            self.path.touch()


def test_training_stops_after_the_step_and_the_file_is_gone(tmp_path: Path) -> None:
    recorder = Recorder()
    callbacks = [Touches(tmp_path / "STOP", 2), StopFile(interval_s=0), recorder]
    trainer = quiet(max_epochs=3, default_root_dir=tmp_path, callbacks=callbacks)
    trainer.fit(net(), loader(16, 2))
    assert trainer.global_step == 3
    assert recorder.seen[-2:] == ["epoch_end", "train_end"]
    assert trainer.state.status == "finished"
    assert list(tmp_path.iterdir()) == []


def test_a_file_of_an_earlier_run_does_not_stop_this_one(tmp_path: Path, caplog: Any) -> None:
    path = tmp_path / "halt"
    path.touch()
    trainer = quiet(max_epochs=1, callbacks=[StopFile(path, interval_s=0)])
    trainer.fit(net(), loader(8, 2))
    assert trainer.global_step == 4
    assert not path.exists()
    assert "existed before training began" in caplog.text


def test_min_steps_hold(tmp_path: Path) -> None:
    stop = StopFile(tmp_path / "STOP", interval_s=0)
    trainer = quiet(max_epochs=2, min_steps=4, callbacks=[Touches(tmp_path / "STOP", 1), stop])
    trainer.fit(net(), loader(16, 2))
    assert trainer.global_step >= 4


def test_it_looks_only_now_and_then(tmp_path: Path) -> None:
    stop = StopFile(tmp_path / "STOP", interval_s=1000)
    trainer = quiet(max_epochs=1, callbacks=[Touches(tmp_path / "STOP", 2), stop])
    trainer.fit(net(), loader(16, 2))
    assert trainer.global_step == 8


def test_a_negative_interval_is_an_error() -> None:
    with pytest.raises(ConfigError, match="interval_s=-1 is negative"):
        StopFile(interval_s=-1)
