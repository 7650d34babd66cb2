"""What the bar shows between two log boundaries."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from toys import Net, loader, quiet

from loopwright.callbacks import Callback
from loopwright.trainer.metrics.current_values import CurrentValues
from loopwright.trainer.metrics.metrics import Metrics


class Seen(Callback):
    def __init__(self) -> None:
        self.values: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.values.append(dict(trainer.progress_bar_metrics))


def seen(log: Any, **arguments: Any) -> Seen:
    class Logging(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            log(self, batch_idx)
            return super().training_step(batch, batch_idx)

    callback = Seen()
    trainer = quiet(max_epochs=1, log_every_n_steps=50, callbacks=[callback], **arguments)
    trainer.fit(Logging(), loader(8))
    return callback


def test_values_are_there_from_the_first_step_and_current(monkeypatch: pytest.MonkeyPatch) -> None:
    got = seen(lambda m, i: m.log("loss", torch.tensor(float(i)), prog_bar=True))
    assert [one["loss"] for one in got.values] == [0.0, 1.0, 2.0, 3.0]
    assert all(type(one["loss"]) is float for one in got.values)


def test_a_value_by_step_and_epoch_has_both_names() -> None:
    got = seen(lambda m, i: m.log("loss", float(i), prog_bar=True, on_step=True, on_epoch=True))
    assert got.values[2] == {"loss_step": 2.0, "loss": 2.0}


def test_what_is_not_for_the_bar_is_left_out() -> None:
    assert seen(lambda m, i: m.log("loss", float(i))).values[0] == {}


def test_a_trainer_can_still_be_pickled() -> None:
    trainer = quiet(max_epochs=1)
    assert trainer.progress_bar_metrics == {}
    assert pickle.loads(pickle.dumps(trainer)).progress_bar_metrics == {}


def test_a_device_whose_copies_would_be_waited_for_is_not_read() -> None:
    metrics = Metrics(torch.device("meta"))
    metrics.table = metrics.table_of("training_step")
    metrics.log("loss", torch.ones((), device="meta"), prog_bar=True)
    assert CurrentValues(metrics).read() == {}


@pytest.mark.gpu
def test_a_device_is_not_waited_for() -> None:
    got = seen(lambda m, i: m.log("loss", torch.tensor(float(i), device=m.device), prog_bar=True), accelerator="cuda")
    assert set(got.values[-1]) <= {"loss"}
