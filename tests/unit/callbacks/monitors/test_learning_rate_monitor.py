from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fakes import FakeLogger, FakeTrainer

from loopwright.callbacks import LearningRateMonitor
from loopwright.errors import ConfigError


def fit(
    tmp_path: Path,
    monitor: LearningRateMonitor,
    *,
    groups: list[dict[str, Any]] | None = None,
    optimizer: str = "SGD",
    schedule: str | None = "step",
    name: str | None = None,
    **kwargs: Any,
) -> FakeTrainer:
    parameters = [torch.nn.Parameter(torch.ones(1)) for _ in range(3)]
    specs = groups or [{"lr": 1.0}]
    made = getattr(torch.optim, optimizer)([{"params": [p], **g} for p, g in zip(parameters, specs, strict=False)])
    trainer = FakeTrainer(tmp_path, [monitor], loggers=[FakeLogger(str(tmp_path))], **kwargs)
    trainer.optimizers = [made]
    if schedule:
        halve = torch.optim.lr_scheduler.ExponentialLR(made, 0.5)
        trainer.lr_scheduler_configs = [SimpleNamespace(scheduler=halve, interval=schedule, name=name)]
    made.step()
    trainer.fit()
    return trainer


def test_the_rate_beside_a_step_is_the_one_it_used(tmp_path: Path) -> None:
    trainer = fit(tmp_path, LearningRateMonitor(), windows=4)
    assert trainer.logged == [({"lr-SGD": 0.5**step}, step) for step in range(4)]


def test_only_steps_that_are_logged_are_noted(tmp_path: Path) -> None:
    monitor = LearningRateMonitor("step")
    trainer = fit(tmp_path, monitor, windows=6, accumulate=2, log_every=3)
    assert trainer.logged == [({"lr-SGD": 0.25}, 2), ({"lr-SGD": 0.5**5}, 5)]
    assert monitor.lrs == {"lr-SGD": [0.25, 0.5**5]}


def test_a_skipped_step_logs_nothing(tmp_path: Path) -> None:
    assert [step for _, step in fit(tmp_path, LearningRateMonitor(), windows=3, skipped=[2]).logged] == [0, 1]


def test_epochs_are_logged_at_their_beginning(tmp_path: Path) -> None:
    trainer = fit(tmp_path, LearningRateMonitor("epoch"), windows=2, max_epochs=2)
    assert trainer.logged == [({"lr-SGD": 1.0}, 0), ({"lr-SGD": 0.25}, 2)]


def test_none_follows_the_schedule(tmp_path: Path) -> None:
    trainer = fit(tmp_path, LearningRateMonitor(), schedule="epoch", max_epochs=2)
    assert [step for _, step in trainer.logged] == [0, 4]


def test_groups_names_momentum_and_weight_decay(tmp_path: Path) -> None:
    groups: list[dict[str, Any]] = [
        {"lr": 1.0, "momentum": 0.9, "weight_decay": 0.01},
        {"lr": 2.0, "momentum": 0.8, "name": "head"},
    ]
    monitor = LearningRateMonitor(log_momentum=True, log_weight_decay=True)
    trainer = fit(tmp_path, monitor, groups=groups, schedule=None, windows=1)
    assert trainer.logged[0][0] == {
        "lr-SGD/pg1": 1.0,
        "lr-SGD/pg1-momentum": 0.9,
        "lr-SGD/pg1-weight_decay": 0.01,
        "lr-SGD/head": 2.0,
        "lr-SGD/head-momentum": 0.8,
        "lr-SGD/head-weight_decay": 0.0,
    }
    assert monitor.last_momentum_values == {"lr-SGD/pg1-momentum": 0.9, "lr-SGD/head-momentum": 0.8}


def test_the_rates_of_a_group_stay_together_when_another_is_added(tmp_path: Path) -> None:
    class AddsGroup(LearningRateMonitor):
        def on_train_batch_start(self, trainer: Any, *rest: Any) -> None:
            if trainer.global_step == 2:
                trainer.optimizers[0].add_param_group({"params": [torch.nn.Parameter(torch.ones(1))], "lr": 0.5})
            super().on_train_batch_start(trainer, *rest)

    monitor = AddsGroup()
    fit(tmp_path, monitor, schedule=None, windows=3)
    assert monitor.lrs == {"lr-SGD/pg1": [1.0, 1.0, 1.0], "lr-SGD/pg2": [0.5]}


def test_betas_are_momentum_and_the_schedules_name_is_the_key(tmp_path: Path) -> None:
    monitor = LearningRateMonitor(log_momentum=True)
    trainer = fit(tmp_path, monitor, optimizer="Adam", groups=[{"lr": 1.0, "betas": (0.7, 0.9)}], name="x", windows=1)
    assert trainer.logged[0][0] == {"x": 1.0, "x-momentum": 0.7}


def test_two_optimizers_of_a_class_have_different_names(tmp_path: Path) -> None:
    trainer = FakeTrainer(tmp_path, [LearningRateMonitor()], loggers=[FakeLogger(str(tmp_path))], windows=1)
    trainer.optimizers = [torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=lr) for lr in (0.1, 0.2)]
    trainer.fit()
    assert trainer.logged[0][0] == {"lr-SGD": 0.1, "lr-SGD-1": 0.2}


def test_what_cannot_work_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="logging_interval"):
        LearningRateMonitor("batch")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="no logger"):
        FakeTrainer(tmp_path, [LearningRateMonitor()]).fit()
    with pytest.raises(ConfigError, match="share a name"):
        fit(tmp_path, LearningRateMonitor(), groups=[{"lr": 1.0, "name": "a"}, {"lr": 1.0, "name": "a"}])
