"""What configure_optimizers may return, and when schedules are stepped."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    ExponentialLR,
    LambdaLR,
    OneCycleLR,
    ReduceLROnPlateau,
    StepLR,
)
from toys import Net, Recorder, RecordingLogger, ValidatedNet, loader, net, quiet

from loopwright.callbacks import LearningRateMonitor
from loopwright.errors import ModuleError


class Returning(Net):
    """Returns from configure_optimizers what a function of its optimizer makes."""

    def __init__(self, make: Any, *, lr: float = 1.0) -> None:
        super().__init__()
        self.make = make
        self.lr = lr

    def configure_optimizers(self) -> Any:
        return self.make(SGD(self.parameters(), lr=self.lr))


class ValidatedReturning(Returning, ValidatedNet):
    """The same, with a validation."""


def rates(make: Any, count: int = 8, **kwargs: Any) -> list[float]:
    """Return the learning rate after each micro-batch of a fit over `count` samples in batches of 2."""
    recorder = Recorder(lambda trainer: trainer.optimizers[0].param_groups[0]["lr"])
    kwargs = {"max_epochs": 1, **kwargs}
    trainer = quiet(callbacks=[recorder, *kwargs.pop("callbacks", [])], **kwargs)
    trainer.fit(net(Returning, make), loader(count))
    return recorder.notes


def halving(optimizer: Any) -> StepLR:
    return StepLR(optimizer, 1, 0.5)


# --- return forms ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda o: ([o], [halving(o)]),
        lambda o: [[o], [halving(o)]],
        lambda o: ([o], halving(o)),
        lambda o: ((o,), (halving(o),)),
        lambda o: ([o], [{"scheduler": halving(o), "interval": "epoch"}]),
        lambda o: {"optimizer": o, "lr_scheduler": halving(o)},
        lambda o: {"optimizer": o, "lr_scheduler": {"scheduler": halving(o)}},
        lambda o: [{"optimizer": o, "lr_scheduler": halving(o)}],
        lambda o: ({"optimizer": o, "lr_scheduler": {"scheduler": halving(o), "name": "half"}},),
    ],
)
def test_every_form_with_a_schedule_steps_it_once_per_epoch(make: Any) -> None:
    assert rates(make, max_epochs=2) == [1, 1, 1, 0.5, 0.5, 0.5, 0.5, 0.25]


@pytest.mark.parametrize(
    "make",
    [
        lambda o: o,
        lambda o: [o],
        lambda o: (o,),
        lambda o: {"optimizer": o},
        lambda o: [{"optimizer": o}],
        lambda o: ([o], []),
        lambda o: {"optimizer": o, "lr_scheduler": None},
    ],
)
def test_every_form_without_a_schedule_keeps_the_rate(make: Any) -> None:
    assert rates(make) == [1] * 4


class NoState:
    def step(self) -> None: ...


class Foreign:
    def step(self) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


other = SGD([nn.Parameter(torch.zeros(1))], lr=1.0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda o: 1, "got int"),
        (lambda o: "SGD", "got str"),
        (lambda o: [o, 1], r"got list of \['SGD', 'int'\]"),
        (lambda o: [1], "got list"),
        (lambda o: ([1], []), "item 0 is int"),
        (lambda o: {"optimiser": o}, r"\['optimiser'\] and no 'optimizer'"),
        (lambda o: {"optimizer": 3}, "item 0 is int"),
        (lambda o: {"optimizer": o, "lr_scheduler": {"interval": "step"}}, "no 'scheduler'"),
        (lambda o: ([o], [{"scheduler": halving(o), "interval": "batch"}]), "interval='batch'"),
        (lambda o: ([o], [{"scheduler": halving(o), "frequency": 0}]), "frequency=0"),
        (lambda o: ([o], [{"scheduler": halving(o), "frequency": 1.5}]), "frequency=1.5"),
        (lambda o: ([o], [NoState()]), "NoState has no state_dict"),
        (lambda o: ([o], [Foreign()]), "Foreign is not a torch schedule"),
        (lambda o: ([o], [halving(other)]), "StepLR belongs to an optimizer that was not returned"),
        (lambda o: ([o], [ReduceLROnPlateau(o)]), "ReduceLROnPlateau needs the name of a metric"),
        (lambda o: [o, o], r"each parameter in one optimizer, got in two: net.0.weight \(SGD and SGD\)"),
    ],
)
def test_a_form_that_is_not_accepted_says_what_came(make: Any, message: str) -> None:
    with pytest.raises(ModuleError, match=message) as caught:
        rates(make)
    assert caught.value.fix


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda o: {"optimizer": o, "lr_schedulers": halving(o)}, r"'lr_schedulers' \(did you mean 'lr_scheduler'"),
        (lambda o: ([o], [{"scheduler": halving(o), "intervall": "step"}]), r"'intervall' \(did you mean 'interval'"),
        (lambda o: ([o], [OneCycleLR(o, 1.0, total_steps=9)]), "interval='step'"),
    ],
)
def test_a_likely_mistake_is_warned_about(make: Any, message: str) -> None:
    with pytest.warns(UserWarning, match=message):
        rates(make)


# --- interval and frequency ------------------------------------------------------------------------------------------


def test_an_interval_of_steps_counts_optimizer_steps_not_micro_batches() -> None:
    def make(optimizer: Any) -> Any:
        return [optimizer], [{"scheduler": halving(optimizer), "interval": "step", "frequency": 2}]

    seen = rates(make, count=16, accumulate_grad_batches=2, max_epochs=2)
    # 8 batches are 4 steps per epoch: the rate halves after steps 2, 4, 6, 8.
    assert seen == [1, 1, 1, 0.5, 0.5, 0.5, 0.5, 0.25, 0.25, 0.25, 0.25, 0.125, 0.125, 0.125, 0.125, 0.0625]


def test_nine_steps_of_four_micro_batches_are_four_updates_of_every_second_step() -> None:
    def make(optimizer: Any) -> Any:
        return [optimizer], [{"scheduler": halving(optimizer), "interval": "step", "frequency": 2}]

    assert rates(make, count=72, accumulate_grad_batches=4)[-1] == 0.5**4


def test_a_frequency_of_epochs_counts_epochs() -> None:
    def make(optimizer: Any) -> Any:
        return [optimizer], [{"scheduler": halving(optimizer), "frequency": 2}]

    assert rates(make, count=4, max_epochs=5)[1::2] == [1, 0.5, 0.5, 0.25, 0.25]


def test_an_epoch_schedule_is_stepped_once_per_epoch_however_often_validation_runs() -> None:
    recorder = Recorder(lambda trainer: trainer.optimizers[0].param_groups[0]["lr"])
    trainer = quiet(max_epochs=3, val_check_interval=0.25, callbacks=recorder)
    trainer.fit(net(ValidatedReturning, lambda o: ([o], [halving(o)])), loader(), loader(4))
    assert recorder.seen.count("validation") == 3 * 4 + 1
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.125
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == 3


def test_several_schedules_of_one_optimizer_are_stepped_by_their_own_intervals() -> None:
    def make(optimizer: Any) -> Any:
        return [optimizer], [
            {"scheduler": StepLR(optimizer, 1, 0.5), "interval": "step"},
            {"scheduler": StepLR(optimizer, 1, 0.1), "interval": "epoch"},
        ]

    assert rates(make, count=4)[-1] == pytest.approx(0.25 * 0.1)


@pytest.mark.parametrize(
    "limits", [{"max_epochs": 3}, {"max_steps": 12, "max_epochs": -1}, {"max_epochs": 3, "limit_train_batches": 4}]
)
def test_a_schedule_over_the_estimated_steps_ends_exactly_at_its_end(limits: dict[str, Any]) -> None:
    class Cycle(Net):
        def configure_optimizers(self) -> Any:
            optimizer = SGD(self.parameters(), lr=0.1)
            self.total = self.trainer.estimated_stepping_batches
            schedule = OneCycleLR(optimizer, max_lr=0.5, total_steps=self.total)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    module = net(Cycle)
    trainer = quiet(**limits)
    # One call too many would be torch's own error.
    trainer.fit(module, loader(8))
    schedule = trainer.lr_scheduler_configs[0].scheduler
    assert module.total == trainer.global_step == 12
    assert schedule.last_epoch == 12 or schedule._step_count == 13


def test_estimated_steps_count_short_windows() -> None:
    estimates: list[float] = []

    class Asking(Net):
        def configure_optimizers(self) -> Any:
            estimates.append(self.trainer.estimated_stepping_batches)
            return super().configure_optimizers()

    trainer = quiet(max_epochs=2, accumulate_grad_batches=4)
    trainer.fit(net(Asking), loader(10))
    quiet(max_epochs=-1, max_time="00:00:00:00").fit(net(Asking), loader(10))
    assert estimates == [4, math.inf]
    assert trainer.global_step == 4


def test_a_cosine_schedule_reaches_its_minimum_at_the_last_step() -> None:
    def make(optimizer: Any) -> Any:
        return [optimizer], [{"scheduler": CosineAnnealingLR(optimizer, T_max=8), "interval": "step"}]

    assert rates(make, max_epochs=2)[-1] == pytest.approx(0, abs=1e-12)


def test_a_skipped_batch_steps_no_schedule_of_steps() -> None:
    class Skipping(Returning):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None if batch_idx in (0, 2) else self.loss(batch)

    trainer = quiet(max_epochs=1)
    trainer.fit(
        net(Skipping, lambda o: ([o], [{"scheduler": halving(o), "interval": "step"}])),
        loader(),
    )
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.25


def test_the_logged_rate_is_the_one_that_was_used() -> None:
    logger = RecordingLogger()
    trainer = quiet(max_epochs=1, logger=logger, log_every_n_steps=1, callbacks=LearningRateMonitor("step"))
    trainer.fit(net(Returning, lambda o: ([o], [{"scheduler": halving(o), "interval": "step"}])), loader())
    assert logger.values("lr-SGD") == [(0, 1.0), (1, 0.5), (2, 0.25), (3, 0.125)]


def test_lr_scheduler_step_of_the_module_replaces_the_trainers() -> None:
    calls: list[tuple[str, Any]] = []

    class Own(Returning):
        def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
            calls.append((type(scheduler).__name__, metric))

    trainer = quiet(max_epochs=2)
    trainer.fit(net(Own, lambda o: ([o], [Foreign()])), loader())
    assert calls == [("Foreign", None)] * 2


def test_a_lambda_schedule_is_stepped_after_the_optimizer_without_a_warning() -> None:
    # torch warns when a schedule is stepped first; warnings are errors here.
    assert rates(lambda o: ([o], [{"scheduler": LambdaLR(o, lambda k: 1 / (k + 1)), "interval": "step"}])) == [
        1 / 2,
        1 / 3,
        1 / 4,
        1 / 5,
    ]


# --- plateau ---------------------------------------------------------------------------------------------------------


class Plateau(ValidatedNet):
    """Logs `losses` one after another as `val_loss`, and has a plateau schedule that waits for nothing."""

    def __init__(self, losses: list[float], **config: Any) -> None:
        super().__init__()
        self.losses = losses
        self.config = config
        self.steps: list[float] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if not self.trainer.sanity_checking:
            self.log("val_loss", self.losses.pop(0))
        else:
            self.log("val_loss", -1000.0)

    def configure_optimizers(self) -> Any:
        optimizer = SGD(self.parameters(), lr=1.0)
        schedule = ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        seen, real = self.steps, schedule.step

        def step(metrics: Any, *args: Any) -> None:
            seen.append(float(metrics))
            real(metrics, *args)

        schedule.step = step  # type: ignore[method-assign]
        config = {"scheduler": schedule, "monitor": "val_loss", **self.config}
        return {"optimizer": optimizer, "lr_scheduler": config}


def test_a_plateau_schedule_is_stepped_once_per_epoch_with_that_epochs_validation() -> None:
    module = net(Plateau, [3.0, 2.0, 4.0])
    trainer = quiet(max_epochs=3)
    trainer.fit(module, loader(), loader(2))
    assert module.steps == [3.0, 2.0, 4.0]
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.5


def test_a_plateau_schedule_never_sees_one_validation_twice() -> None:
    module = net(Plateau, [3.0, 2.0])
    quiet(max_epochs=4, check_val_every_n_epoch=2).fit(module, loader(), loader(2))
    assert module.steps == [3.0, 2.0]


def test_a_plateau_schedule_by_steps_takes_each_new_value_once() -> None:
    module = net(Plateau, [3.0, 2.0, 1.0, 0.5], interval="step")
    quiet(max_epochs=2, val_check_interval=2).fit(module, loader(), loader(2))
    # The last value comes after the last step.
    assert module.steps == [3.0, 2.0, 1.0]


def test_a_plateau_schedule_may_follow_a_training_metric_and_the_short_form_of_monitor() -> None:
    class OnTraining(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            self.log("train_loss", 5.0, on_step=False, on_epoch=True)
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = SGD(self.parameters(), lr=1.0)
            schedule = ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
            return {"optimizer": optimizer, "lr_scheduler": schedule, "monitor": "train_loss"}

    trainer = quiet(max_epochs=3)
    trainer.fit(net(OnTraining), loader())
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.25


def test_a_missing_monitor_is_an_error_that_names_what_was_logged() -> None:
    module = net(Plateau, [1.0], monitor="val_los")
    with (
        pytest.warns(UserWarning, match=r"monitors 'val_los' \(did you mean 'val_loss'"),  # it may be logged later
        pytest.raises(ModuleError, match=r"monitors 'val_los'.*, which was not logged; logged are \['val_loss'\]"),
    ):
        quiet(max_epochs=1).fit(module, loader(), loader(2))


def test_a_missing_monitor_without_strict_is_said_once() -> None:
    module = net(Plateau, [1.0, 2.0], monitor="val_los", strict=False)
    with pytest.warns(UserWarning, match="'val_los' was not logged") as caught:
        quiet(max_epochs=2).fit(module, loader(), loader(2))
    assert len(caught) == 1
    assert module.steps == []


def test_another_schedule_can_be_marked_as_reading_a_metric() -> None:
    class Own(ExponentialLR):
        seen: list[float] = []

        def step(self, metric: Any = None) -> None:  # type: ignore[override]
            if metric is not None:
                self.seen.append(float(metric))
            super().step()

    def make(optimizer: Any) -> Any:
        return [optimizer], [{"scheduler": Own(optimizer, 0.5), "monitor": "val_loss", "reduce_on_plateau": True}]

    trainer = quiet(max_epochs=2, num_sanity_val_steps=0)
    trainer.fit(net(ValidatedReturning, make), loader(), loader(2))
    assert len(Own.seen) == 2
    assert Own.seen[-1] == pytest.approx(float(trainer.callback_metrics["val_loss"]))


def test_adam_with_a_schedule_equals_the_hand_written_loop() -> None:
    def build(module: Net) -> tuple[Any, Any]:
        optimizer = Adam(module.parameters(), lr=0.05)
        return optimizer, CosineAnnealingLR(optimizer, 8)

    class Scheduled(Net):
        def configure_optimizers(self) -> Any:
            optimizer, schedule = build(self)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    expected, module = net(Net), net(Scheduled)
    optimizer, schedule = build(expected)
    for _ in range(2):
        for batch in loader():
            optimizer.zero_grad()
            expected.loss(batch).backward()
            optimizer.step()
            schedule.step()
    quiet(max_epochs=2).fit(module, loader())
    for a, b in zip(module.parameters(), expected.parameters(), strict=True):
        assert torch.equal(a, b)
