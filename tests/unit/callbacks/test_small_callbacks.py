"""Callback, LambdaCallback, GradientAccumulationScheduler, Timer."""

from __future__ import annotations

import inspect
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from fakes import FakeTrainer
from torch import nn

from loopwright.callbacks import Callback, EarlyStopping, GradientAccumulationScheduler, LambdaCallback, Timer
from loopwright.errors import ConfigError


def test_every_hook_does_nothing_and_says_when_it_is_called(tmp_path: Path) -> None:
    for name, method in vars(Callback).items():
        if name in ("setup", "teardown") or name.startswith("on_"):
            assert inspect.getdoc(method), name
            assert list(inspect.signature(method).parameters)[:3] == ["self", "trainer", "pl_module"], name
    callback = Callback()
    FakeTrainer(tmp_path, [callback]).fit()
    assert callback.state_dict() == {}
    assert callback.runs_last is False


def test_state_key_is_the_class_and_can_have_arguments() -> None:
    class Mine(Callback):
        pass

    assert Mine().state_key.endswith("Mine")
    assert Mine()._generate_state_key(a=1, b="x").endswith("Mine{'a': 1, 'b': 'x'}")


def test_two_of_a_class_keep_separate_state(tmp_path: Path) -> None:
    first, second = EarlyStopping("a"), EarlyStopping("b")
    trainer = FakeTrainer(tmp_path, [first, second], val_metrics=lambda step: {"a": 1.0, "b": 2.0})
    trainer.fit()
    trainer.save_checkpoint(str(tmp_path / "c.ckpt"))
    again = [EarlyStopping("b"), EarlyStopping("a")]
    FakeTrainer(tmp_path, again).fit(ckpt_path=str(tmp_path / "c.ckpt"))
    assert [float(callback.best_score) for callback in again] == [2.0, 1.0]


def test_lambda_callback_calls_functions_with_the_hooks_arguments(tmp_path: Path) -> None:
    calls: list[Any] = []
    callback = LambdaCallback(
        setup=lambda trainer, module, stage: calls.append(stage),
        on_train_batch_end=lambda trainer, module, outputs, batch, batch_idx: calls.append(batch_idx),
        on_train_end=None,
    )
    FakeTrainer(tmp_path, [callback], windows=2).fit()
    assert calls == ["fit", 0, 1]


def test_lambda_callback_names_all_wrong_hooks() -> None:
    with pytest.raises(ConfigError, match=r"on_train_epoch_finished.*on_fit_start: expected a function, got int"):
        LambdaCallback(on_train_epoch_finished=print, on_fit_start=3)  # type: ignore[arg-type]


def test_accumulation_changes_at_its_epochs(tmp_path: Path) -> None:
    scheduler = GradientAccumulationScheduler({2: 4, 5: 2})
    assert [scheduler.get_accumulate_grad_batches(epoch) for epoch in range(7)] == [1, 1, 4, 4, 4, 2, 2]
    assert scheduler.scheduling == {0: 1, 2: 4, 5: 2}
    assert scheduler.going_to_accumulate_grad_batches()
    seen: list[int] = []
    note = LambdaCallback(on_train_batch_start=lambda trainer, *_: seen.append(trainer.accumulate_grad_batches))
    trainer = FakeTrainer(tmp_path, [scheduler, note], windows=1, max_epochs=2)
    trainer.current_epoch = 2
    trainer.window, trainer.max_epochs = 2, 3
    trainer.fit()
    assert seen == [4, 4, 4, 4]


@pytest.mark.parametrize("scheduling", [{}, {-1: 2}, {0: 0}, {"0": 1}, {0: 1.5}, [2]])
def test_a_wrong_schedule_is_refused(scheduling: Any) -> None:
    with pytest.raises(ConfigError, match="GradientAccumulationScheduler"):
        GradientAccumulationScheduler(scheduling)


def test_accumulation_set_twice_or_in_manual_optimization_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="both given"):
        FakeTrainer(tmp_path, [GradientAccumulationScheduler({0: 2})], accumulate=4).fit()
    manual = nn.Linear(2, 1)
    manual.automatic_optimization = False  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="manual optimization"):
        FakeTrainer(tmp_path, [GradientAccumulationScheduler({0: 2})]).fit(manual)


@pytest.mark.parametrize(
    ("duration", "seconds"),
    [("01:02:03:04", 93784.0), (timedelta(minutes=2), 120.0), ({"hours": 1, "seconds": 1}, 3601.0), (None, None)],
)
def test_timer_reads_durations(duration: Any, seconds: float | None) -> None:
    timer = Timer(duration)
    assert timer.time_remaining() == seconds
    assert timer.time_elapsed() == 0.0
    assert timer.start_time() is None


@pytest.mark.parametrize("kwargs", [{"duration": "1h"}, {"duration": {"weeke": 1}}, {"interval": "batch"}])
def test_timer_refuses_what_it_cannot_read(kwargs: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="Timer"):
        Timer(**kwargs)


def test_timer_stops_at_the_next_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    timer = Timer(timedelta(seconds=25))
    trainer = FakeTrainer(tmp_path, [timer], windows=10)

    def tick(step: int) -> None:
        now[0] += 10.0

    trainer.batch_hook = tick
    trainer.fit()
    assert trainer.global_step == 3
    assert timer.time_elapsed() == 30.0
    assert timer.time_remaining() == 0.0
    assert (timer.start_time(), timer.end_time()) == (100.0, 130.0)
    assert timer.time_elapsed("validate") == 0.0


def test_timer_counts_earlier_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def make() -> FakeTrainer:
        trainer = FakeTrainer(tmp_path, [Timer(timedelta(seconds=45))], windows=2, max_epochs=10)
        trainer.batch_hook = lambda step: now.__setitem__(0, now[0] + 10.0)
        return trainer

    first = make()
    first.max_epochs = 1
    first.fit()
    first.save_checkpoint(str(tmp_path / "c.ckpt"))
    now[0] += 1000.0
    second = make()
    second.fit(ckpt_path=str(tmp_path / "c.ckpt"))
    assert second.global_step == 5
    second.save_checkpoint(str(tmp_path / "d.ckpt"))
    third = make()
    third.fit(ckpt_path=str(tmp_path / "d.ckpt"))
    assert third.global_step == 5


def test_timer_by_epoch_finishes_the_epoch(tmp_path: Path) -> None:
    trainer = FakeTrainer(tmp_path, [Timer(timedelta(microseconds=1), interval="epoch")], windows=3, max_epochs=5)
    trainer.fit()
    assert trainer.global_step == 3


def test_a_timer_without_time_stops_at_once(tmp_path: Path) -> None:
    timer = Timer("00:00:00:00")
    trainer = FakeTrainer(tmp_path, [timer])
    trainer.fit()
    assert trainer.global_step == 0
    assert timer.time_remaining() == 0.0
