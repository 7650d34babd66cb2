"""The search for speed: with costs that are planted, on a clock that only they move."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from toys import Net, adam, assert_same, loader, net, quiet, weights

import loopwright as lw
from loopwright.errors import ConfigError
from loopwright.tuner import SpeedRow, SpeedTable, Tuner, speed
from loopwright.tuner.trial import Subject

pytestmark = pytest.mark.usefixtures("few_objects")  # a search collects garbage after each trial


class Clock:
    """Moves when it is told to; a worker process has a copy, whose time is not that of the training."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def __deepcopy__(self, memo: object) -> Clock:
        return self  # the time of the search's copies is the search's


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(speed, "perf_counter", clock)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    return clock


class Costly(Dataset[Any]):
    """A sample takes 10 ms of the process that reads it."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        self.clock.now_s += 0.01
        return torch.full((4,), index / 64), torch.ones(1)


class Timed(Net):
    """A step takes 1 ms, and 2 ms more if its optimizer is not fused or its weights are not channels-last."""

    def __init__(self, clock: Clock, make: Any = adam, *, has_images: bool = False) -> None:
        super().__init__(make)
        self.clock = clock
        self.seen: list[Any] = []
        if has_images:
            self.images = nn.Conv2d(2, 2, 2)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.clock.now_s += 0.001
        if hasattr(self, "images") and not self.images.weight.is_contiguous(memory_format=torch.channels_last):
            self.clock.now_s += 0.002
        if not self.trainer.optimizers[0].param_groups[0].get("fused"):
            self.clock.now_s += 0.002
        return self.loss(batch)


def search(module: Any, data: Any = None, trainer: lw.Trainer | None = None, **options: Any) -> SpeedTable:
    trainer = trainer if trainer is not None else quiet(max_epochs=2)
    table = Tuner(trainer).speed(module, data, seconds=0.2, show=False, **options)
    assert table is not None
    return table


def rows_of(table: SpeedTable) -> dict[str, SpeedRow]:
    return {row.setting: row for row in table.rows}


def test_a_planted_cost_of_the_optimizer_is_found_and_nothing_is_changed(clock: Clock) -> None:
    module, data = net(Timed, clock), loader(shuffle=True, generator=torch.Generator().manual_seed(4))
    before, drawn = weights(module), torch.get_rng_state()
    table = search(module, data, settings=["fused"])
    assert table.best == ("fused=True",)
    assert rows_of(table)["fused=True"].ratio == pytest.approx(3.0)
    assert rows_of(table)["as it is"].step_s == pytest.approx(0.003)
    assert table.applied == ()
    assert_same(before, module)
    assert torch.equal(drawn, torch.get_rng_state())
    assert torch.equal(data.generator.get_state(), torch.Generator().manual_seed(4).get_state())  # type: ignore[union-attr]
    assert "configure_optimizers" not in vars(module)


def test_a_search_changes_no_bit_of_the_training_after_it(clock: Clock) -> None:
    def trained(searches: bool) -> Any:
        module, data, trainer = net(Net, adam, dropout=0.5), loader(shuffle=True), quiet(max_epochs=2)
        if searches:
            monotonic = iter(range(10**9))
            table, _ = speed.find_fastest(
                Subject(trainer, module, None, {"train": data}), ["fused"], 20, lambda: next(monotonic)
            )
            assert len(table.rows) == 2
        trainer.fit(module, data)
        return module

    assert_same(trained(searches=True), trained(searches=False))


def test_workers_take_a_loaders_cost_and_apply_sets_them(clock: Clock) -> None:
    module, data = net(Timed, clock), DataLoader(Costly(clock), batch_size=4)
    table = search(module, data, settings=["num_workers"], apply=True)
    rows = rows_of(table)
    assert rows["as it is"].step_s == pytest.approx(0.043)
    best = next(iter(table.best))
    assert best in ("num_workers=1", "num_workers=2")
    assert rows[best].ratio == pytest.approx(43 / 3)
    assert rows[best].keeps_bits
    assert table.applied == table.best
    assert f"num_workers={data.num_workers}" == best
    assert data.prefetch_factor == 2
    assert len(list(data)) == 16


def test_what_is_faster_together_is_measured_together_and_set(clock: Clock) -> None:
    module, trainer = net(Timed, clock, has_images=True), quiet(max_epochs=1)
    table = search(module, loader(), trainer, settings=["channels_last", "fused"], apply=True)
    assert table.best == ("fused=True", "channels_last=True")
    assert rows_of(table)["fused=True, channels_last=True"].ratio == pytest.approx(5.0)
    assert table.applied == table.best
    assert module.images.weight.is_contiguous(memory_format=torch.channels_last)
    trainer.fit(module, loader())
    assert trainer.optimizers[0].param_groups[0]["fused"]


def test_loaders_of_hooks_are_tried_and_set_where_they_read_the_value(clock: Clock) -> None:
    class Own(lw.DataModule):
        def __init__(self) -> None:
            super().__init__()
            self.num_workers = 0

        def train_dataloader(self) -> Any:
            return DataLoader(Costly(clock), batch_size=4, num_workers=self.num_workers)

    class Fixed(Timed):
        def train_dataloader(self) -> Any:
            return DataLoader(Costly(self.clock), batch_size=4)

    data = Own()
    table = search(net(Timed, clock), datamodule=data, settings="num_workers", apply=True)
    assert table.applied == (f"num_workers={data.num_workers}",)
    assert data.num_workers
    table = search(net(Fixed, clock), settings="num_workers", apply=True)
    assert table.applied == ()
    assert "train_dataloader builds the loader" in table.left[0]


def test_what_cannot_be_tried_says_why(clock: Clock) -> None:
    fused = net(Timed, clock, lambda parameters: lw.optim.adamw(parameters))
    table = search(fused, [next(iter(loader()))] * 3, quiet(compile={"backend": "eager"}, matmul_precision="highest"))
    notes = {row.setting: row.note for row in table.rows}
    assert "fused" in notes["fused"]
    assert "compiled" in notes["compile"]
    assert "convolution" in notes["channels_last"]
    assert "matmul_precision" in notes["matmul_precision"]
    assert "list" in notes["num_workers"]
    assert table.best == ()
    assert "Nothing is faster" in str(table)


def test_a_setting_that_fails_is_a_row_and_not_an_error(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing(Timed):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if self.trainer.optimizers[0].param_groups[0].get("fused"):
                raise ValueError("planted")
            return super().training_step(batch, batch_idx)

    table = search(net(Failing, clock), loader(), settings=["fused"])
    assert "ValueError: planted" in rows_of(table)["fused=True"].note
    assert table.best == ()


def test_a_schedule_over_all_steps_can_be_made_in_a_trial(clock: Clock) -> None:
    class Scheduled(Timed):
        def configure_optimizers(self) -> Any:
            optimizer = adam(self.parameters())
            total = int(self.trainer.estimated_stepping_batches)
            schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.01, total_steps=total)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    assert search(net(Scheduled, clock), loader(), settings=["fused"], apply=True).applied == ("fused=True",)


def test_wrong_settings_and_seconds_are_refused() -> None:
    with pytest.raises(ConfigError, match="did you mean 'num_workers'"):
        Tuner(quiet()).speed(net(), loader(), settings=["num_worker"])
    with pytest.raises(ConfigError, match="seconds=0"):
        Tuner(quiet()).speed(net(), loader(), seconds=0)


def test_the_table_has_a_line_for_each_setting() -> None:
    rows = (
        SpeedRow("as it is", 0.000250, 0.02, 1.0, 100),
        SpeedRow("fused=True", 0.000093, 0.03, 2.69, 300, keeps_bits=False),
        SpeedRow("pin_memory", note="the device is the CPU"),
    )
    lines = str(SpeedTable(rows, ("fused=True",))).splitlines()
    assert lines[1].split() == ["as", "it", "is", "250", "us", "2%", "1.00"]
    assert lines[2].split()[:5] == ["fused=True", "93", "us", "3%", "2.69"]
    assert "last digits" in lines[2]
    assert lines[3].endswith("the device is the CPU")
    assert lines[4] == "Fastest: fused=True."
