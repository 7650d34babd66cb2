"""The preview of a schedule equals the rates of the training itself."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, OneCycleLR, ReduceLROnPlateau, SequentialLR, StepLR
from toys import Net, Unsized, assert_same, loader, net, quiet, weights

import loopwright as lw
from loopwright.tuner import Tuner, preview_schedule


class Scheduled(Net):
    def __init__(self, kind: str = "onecycle") -> None:
        super().__init__()
        self.kind = kind
        self.rates: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if not self.rates or self.steps_seen != self.trainer.global_step:
            self.rates.append(self.optimizers().param_groups[0]["lr"])
            self.steps_seen = self.trainer.global_step
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        if self.kind == "onecycle":
            total = int(self.trainer.estimated_stepping_batches)
            schedule: Any = OneCycleLR(optimizer, max_lr=0.3, total_steps=total)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]
        if self.kind == "warmup":
            parts = [LinearLR(optimizer, 0.1, total_iters=3), CosineAnnealingLR(optimizer, 10)]
            schedule = SequentialLR(optimizer, parts, milestones=[3])
            return [optimizer], [{"scheduler": schedule, "interval": "step", "frequency": 2}]
        if self.kind == "plateau":
            return {"optimizer": optimizer, "lr_scheduler": ReduceLROnPlateau(optimizer), "monitor": "loss"}
        return [optimizer], [StepLR(optimizer, 1, gamma=0.5)]


@pytest.mark.parametrize("kind", ["onecycle", "warmup", "epochs"])
@pytest.mark.parametrize("plan", [{"max_epochs": 3}, {"max_steps": 7}, {"max_epochs": 2, "accumulate_grad_batches": 3}])
def test_it_equals_the_rates_of_training(kind: str, plan: dict[str, Any]) -> None:
    module, trainer = net(Scheduled, kind), quiet(**plan)
    state = weights(module)
    preview = preview_schedule(trainer, module, loader(10, 2))
    assert_same(module, state)
    assert module.rates == []
    trainer.fit(module, loader(10, 2))
    assert preview.lrs == {"lr-SGD": module.rates}


def test_epochs_are_marked_and_plateaus_are_named(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    preview = Tuner(quiet(max_epochs=2)).preview_schedule(net(Scheduled, "plateau"), loader(8, 2))
    assert preview.epoch_starts == [0, 4]
    assert preview.left_out == ["ReduceLROnPlateau"]
    assert preview.lrs == {"lr-SGD": [0.1] * 8}
    figure = preview.plot()
    assert list(figure.axes[0].lines[0].get_ydata()) == preview.lrs["lr-SGD"]
    figure.savefig(tmp_path / "lr.png")
    assert (tmp_path / "lr.png").stat().st_size > 5_000


def test_a_schedule_of_accumulation_is_followed() -> None:
    scheduler = lw.GradientAccumulationScheduler({0: 1, 1: 4})
    preview = preview_schedule(quiet(max_epochs=2, callbacks=[scheduler]), net(Scheduled, "epochs"), loader(8, 2))
    assert preview.lrs["lr-SGD"] == [0.1] * 4 + [0.05]


def test_an_endless_training_needs_a_number_of_steps() -> None:
    endless = Unsized(list(loader(8, 2)))
    with pytest.raises(lw.ConfigError, match="num_steps"):
        preview_schedule(quiet(max_epochs=-1), net(Scheduled, "warmup"), endless)
    preview = preview_schedule(quiet(max_epochs=-1), net(Scheduled, "warmup"), endless, num_steps=6)
    assert len(preview.lrs["lr-SGD"]) == 6
    assert not math.isclose(preview.lrs["lr-SGD"][0], preview.lrs["lr-SGD"][-1])
