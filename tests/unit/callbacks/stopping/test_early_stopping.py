from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import FakeTrainer, interrupted_at

from loopwright.callbacks import EarlyStopping, EarlyStoppingReason
from loopwright.errors import ConfigError, ModuleError


def run(tmp_path: Path, values: list[float], stopping: EarlyStopping, **kwargs: Any) -> FakeTrainer:
    trainer = FakeTrainer(
        tmp_path, [stopping], windows=1, max_epochs=len(values), val_metrics=lambda s: {"v": values[s - 1]}, **kwargs
    )
    trainer.fit()
    return trainer


def test_stops_after_patience_checks_without_improvement(tmp_path: Path) -> None:
    stopping = EarlyStopping("v", patience=2)
    trainer = run(tmp_path, [1.0, 0.5, 0.6, 0.5, 0.1], stopping)
    assert trainer.global_step == 4
    assert (stopping.wait_count, stopping.stopped_epoch) == (2, 3)
    assert stopping.stopping_reason is EarlyStoppingReason.PATIENCE_EXHAUSTED
    assert stopping.stopping_reason_message == "v = 0.5 did not improve on 0.5 in 2 checks."
    assert float(stopping.best_score) == 0.5


def test_a_stop_is_logged_once_at_the_end_and_when_found_if_verbose(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "loopwright")
    run(tmp_path, [1.0, 2.0], EarlyStopping("v", patience=1))
    assert "EarlyStopping: " not in caplog.text  # the line at the end of a fit has it
    run(tmp_path, [1.0, 2.0], EarlyStopping("v", patience=1, verbose=True))
    assert caplog.text.count("EarlyStopping: v = 2 did not improve on 1 in 1 check.") == 1


def test_min_delta_counts_only_larger_changes(tmp_path: Path) -> None:
    stopping = EarlyStopping("v", min_delta=0.1, patience=2)
    assert run(tmp_path, [1.0, 0.95, 0.91, 0.89], stopping).global_step == 3
    assert stopping.stopping_reason_message == "v = 0.91 did not improve on 1 by more than 0.1 in 2 checks."
    assert run(tmp_path, [1.0, 1.05, 1.2, 1.31], EarlyStopping("v", 0.1, 2, mode="max")).global_step == 4


def test_nan_stops(tmp_path: Path) -> None:
    stopping = EarlyStopping("v")
    assert run(tmp_path, [1.0, math.nan, 0.5], stopping).global_step == 2
    assert stopping.stopping_reason is EarlyStoppingReason.NON_FINITE_METRIC


def test_nan_counts_as_no_improvement_without_check_finite(tmp_path: Path) -> None:
    assert run(tmp_path, [1.0, math.nan, 0.5], EarlyStopping("v", check_finite=False, patience=2)).global_step == 3


def test_thresholds(tmp_path: Path) -> None:
    good = EarlyStopping("v", stopping_threshold=0.3)
    assert run(tmp_path, [1.0, 0.3, 0.2, 0.1], good).global_step == 3
    assert good.stopping_reason is EarlyStoppingReason.STOPPING_THRESHOLD
    bad = EarlyStopping("v", divergence_threshold=2.0)
    assert run(tmp_path, [1.0, 2.0, 2.5, 0.1], bad).global_step == 3
    assert bad.stopping_reason is EarlyStoppingReason.DIVERGENCE_THRESHOLD
    worse = EarlyStopping("v", mode="max", divergence_threshold=0.5)
    assert run(tmp_path, [1.0, 0.4, 2.0], worse).global_step == 2


def test_a_missing_metric_names_those_that_exist(tmp_path: Path) -> None:
    with pytest.raises(ModuleError, match=r"'vv'.*\(did you mean 'v'\?\).*there are \['v'\]"):
        run(tmp_path, [1.0], EarlyStopping("vv"))


def test_a_missing_metric_is_said_once_if_not_strict(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert run(tmp_path, [1.0, 2.0], EarlyStopping("x", strict=False)).global_step == 2
    assert caplog.text.count("no metric 'x'") == 1


def test_a_value_is_not_counted_twice(tmp_path: Path) -> None:
    stopping = EarlyStopping("v", patience=1, check_on_train_epoch_end=True, strict=False)
    run(tmp_path, [1.0, 1.0, 0.9, 0.9, 0.8, 0.8], stopping, check_val_every_n_epoch=2)
    assert stopping.wait_count == 0


def test_validations_within_an_epoch_are_checked(tmp_path: Path) -> None:
    values = {2: 1.0, 4: 2.0, 6: 3.0, 8: 4.0}
    stopping = EarlyStopping("v", patience=2)
    trainer = FakeTrainer(tmp_path, [stopping], windows=8, val_every=2, val_metrics=lambda s: {"v": values[s]})
    trainer.fit()
    assert trainer.global_step == 6


def test_sanity_check_and_fast_dev_run_are_not_counted(tmp_path: Path) -> None:
    stopping = EarlyStopping("v", patience=0)
    run(tmp_path, [1.0], stopping, fast_dev_run=True)
    assert stopping.wait_count == 0
    assert run(tmp_path, [1.0, 0.5], EarlyStopping("v", patience=1), sanity=True).global_step == 2


@pytest.mark.parametrize("stop", range(1, 6))
def test_resume_stops_where_the_uninterrupted_run_stops(tmp_path: Path, stop: int) -> None:
    values = [1.0, 0.5, 0.6, 0.7, 0.8, 0.1, 0.0]

    def make() -> FakeTrainer:
        return FakeTrainer(
            tmp_path,
            [EarlyStopping("v", patience=3)],
            windows=1,
            max_epochs=7,
            val_metrics=lambda s: {"v": values[s - 1]},
        )

    whole = make()
    whole.fit()
    assert whole.global_step == 5
    first = make()
    first.max_epochs = stop
    first.fit()
    path = str(tmp_path / "c.ckpt")
    first.save_checkpoint(path)
    resumed = make()
    resumed.fit(ckpt_path=path)
    assert resumed.global_step == 5
    assert resumed.callbacks[0].state_dict() == whole.callbacks[0].state_dict()


def test_patience_can_be_raised_for_a_run_that_was_stopped(tmp_path: Path) -> None:
    first = run(tmp_path, [1.0, 2.0, 3.0, 4.0, 5.0], EarlyStopping("v", patience=2))
    first.save_checkpoint(str(tmp_path / "c.ckpt"))
    values = [1.0, 2.0, 3.0, 4.0, 5.0]
    again = FakeTrainer(
        tmp_path, [EarlyStopping("v", patience=3)], windows=1, max_epochs=5, val_metrics=lambda s: {"v": values[s - 1]}
    )
    again.fit(ckpt_path=str(tmp_path / "c.ckpt"))
    assert (first.global_step, again.global_step) == (3, 4)


def test_an_exception_in_training_is_not_its_business(tmp_path: Path) -> None:
    stopping = EarlyStopping("v")
    trainer = FakeTrainer(tmp_path, [stopping], val_metrics=lambda s: {"v": 1.0})
    with interrupted_at(trainer, 2, RuntimeError("bug")):
        trainer.fit()
    assert stopping.best_score == torch.tensor(math.inf)


@pytest.mark.parametrize(
    "kwargs",
    [
        {"monitor": ""},
        {"monitor": "v", "mode": "up"},
        {"monitor": "v", "patience": -1},
        {"monitor": "v", "min_delta": -1},
    ],
)
def test_wrong_arguments_are_refused(kwargs: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="EarlyStopping"):
        EarlyStopping(**kwargs)


def test_state_key_tells_monitor_and_mode_apart() -> None:
    assert EarlyStopping("a").state_key == "EarlyStopping{'monitor': 'a', 'mode': 'min'}"
