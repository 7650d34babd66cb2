"""The learning-rate search: what it finds, and that it leaves nothing behind."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from searched import Data, Searched
from torch import nn
from toys import Net, RecordingLogger, assert_same, loader, net, quiet, weights

import loopwright as lw
from loopwright.data.rng import capture_rng, kinds_that_moved
from loopwright.tuner import Tuner
from loopwright.tuner.lr_curve import LearningRateCurve

pytestmark = pytest.mark.usefixtures("few_objects")  # a search collects garbage after each trial


def test_the_rate_rises_as_planned_and_the_suggestion_is_set() -> None:
    module = net(Searched)
    curve = Tuner(quiet(max_epochs=1)).lr_find(module, min_lr=1e-4, max_lr=1.0, num_training=21)
    assert curve is not None
    assert curve.results["lr"][:2] == pytest.approx([1e-4, 1e-4 * 10**0.2])
    assert len(curve.results["loss"]) == len(curve.results["lr"]) == len(curve.raw_losses)
    assert module.lr == curve.suggestion()


def test_the_losses_are_those_of_a_hand_written_range_test() -> None:
    module, by_hand = net(Net), net(Net)
    data = loader(16, 2)
    curve = Tuner(quiet()).lr_find(
        module, data, min_lr=0.001, max_lr=0.1, num_training=12, mode="linear", early_stop_threshold=None,
        update_attr=False,
    )  # fmt: skip
    optimizer = torch.optim.SGD(by_hand.parameters())
    expected = []
    for step, batch in enumerate([*data, *data][:12]):
        optimizer.param_groups[0]["lr"] = 0.001 + 0.099 * step / 11
        optimizer.zero_grad()
        loss = by_hand.loss(batch)
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    assert curve is not None
    assert curve.raw_losses == expected


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    module = net(Searched)
    logger = RecordingLogger()
    trainer = quiet(max_epochs=1, logger=logger, enable_checkpointing=True, default_root_dir=str(tmp_path))
    state, before, drawn = weights(module), capture_rng(), module.data.generator.get_state()
    attributes = set(vars(module))
    Tuner(trainer).lr_find(module, num_training=20)
    Tuner(trainer).scale_batch_size(module)
    module.lr, module.batch_size = 0.5, 4
    assert_same(module, state)
    assert all(p.grad is None for p in module.parameters())
    assert set(vars(module)) == attributes
    assert module.sizes == []
    assert module.trainer is trainer
    after = capture_rng()
    assert not kinds_that_moved(before, after)
    assert torch.equal(module.data.generator.get_state(), drawn)
    assert (trainer.global_step, trainer.current_epoch, trainer.state.fn) == (0, 0, None)
    assert logger.rows == []
    assert list(tmp_path.iterdir()) == []


def test_training_after_a_search_equals_training_without_it() -> None:
    with_search, without = net(Searched), net(Searched)
    for module, searches in ((with_search, True), (without, False)):
        trainer = quiet(max_epochs=2)
        torch.manual_seed(5)
        random.seed(5)
        if searches:
            Tuner(trainer).lr_find(module, num_training=15, update_attr=False)
        trainer.fit(module)
    assert_same(with_search, without)
    assert with_search.sizes == without.sizes


def test_groups_keep_their_ratio_and_schedules_do_not_interfere() -> None:
    seen: list[list[float]] = []

    class Groups(Net):
        def configure_optimizers(self) -> Any:
            parameters = list(self.parameters())
            groups = [{"params": parameters[:2], "lr": 0.01}, {"params": parameters[2:], "lr": 0.1}]
            optimizer = torch.optim.SGD(groups)
            return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.1)]

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            seen.append([group["lr"] for group in self.optimizers().param_groups])
            return self.loss(batch)

        def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
            raise AssertionError("a schedule was stepped")

    Tuner(quiet()).lr_find(
        net(Groups), loader(4, 2), min_lr=0.001, max_lr=0.1, num_training=5, update_attr=False
    )  # fmt: skip
    for step, (first, second) in enumerate(seen):
        assert second == pytest.approx(0.001 * 100 ** (step / 4))
        assert first == pytest.approx(second / 10)


def test_an_exploding_loss_ends_the_search() -> None:
    module = net(Net)
    curve = Tuner(quiet()).lr_find(
        module, loader(64, 2), min_lr=1e-3, max_lr=1e6, num_training=60, update_attr=False
    )  # fmt: skip
    assert curve is not None
    assert len(curve.raw_losses) < 60
    lr = curve.suggestion()
    assert lr is not None
    assert lr < curve.results["lr"][-1]


def test_a_loss_that_is_not_finite_ends_the_search_and_does_not_count() -> None:
    class Breaks(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.loss(batch) * (math.nan if self.trainer.global_step >= 15 else 1.0)

    curve = Tuner(quiet()).lr_find(net(Breaks), loader(64, 2), num_training=30, update_attr=False)
    assert curve is not None
    assert len(curve.raw_losses) == 16
    assert math.isnan(curve.raw_losses[-1])
    assert curve.suggestion() in curve.results["lr"][10:15]


@pytest.mark.parametrize("which", ["global_step", "batches", "all"])
def test_a_step_without_a_loss_has_its_rate_and_no_loss(which: str) -> None:
    class Gaps(Net):
        num_steps = 0

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            step = self.trainer.global_step if which == "global_step" else self.num_steps
            self.num_steps += 1
            return None if step in (5, 12) or which == "all" else self.loss(batch)

    def search() -> Any:
        tuner = Tuner(quiet())
        return tuner.lr_find(net(Gaps), loader(24, 2), num_training=20, early_stop_threshold=None, update_attr=False)

    if which == "all":
        with pytest.raises(lw.errors.DataError, match="saw no loss"):
            search()
        return
    curve = search()
    assert [i for i, loss in enumerate(curve.results["loss"]) if math.isnan(loss)] == [5, 12]
    assert curve.results["lr"] == [curve.lr_at(step) for step in range(20)]
    # The average passes over them, as over steps that were not taken.
    kept = [loss for loss in curve.raw_losses if not math.isnan(loss)]
    average = 0.0
    for loss in kept:
        average = 0.98 * average + 0.02 * loss
    assert curve.results["loss"][-1] == pytest.approx(average / (1 - 0.98 ** len(kept)), rel=1e-12)
    assert curve.suggestion() is not None


def test_accumulation_counts_optimizer_steps() -> None:
    module = net(Searched)
    curve = Tuner(quiet(accumulate_grad_batches=3)).lr_find(
        module, num_training=6, early_stop_threshold=None, update_attr=False
    )  # fmt: skip
    assert curve is not None
    assert len(curve.raw_losses) == 6


def test_a_hyperparameter_is_set_where_it_is() -> None:
    module = net(Searched, hyper=True)
    curve = Tuner(quiet()).lr_find(module, num_training=20)
    assert curve is not None
    assert module.hparams.lr == curve.suggestion()
    assert not hasattr(module, "lr")


def test_the_module_may_use_its_logger_and_bring_callbacks(tmp_path: Path) -> None:
    class Talks(Searched):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.logger.experiment.add_scalar("x", 1.0, 0)
            return super().training_step(batch, batch_idx)

        def configure_callbacks(self) -> Any:
            return lw.ModelCheckpoint(dirpath=tmp_path / "own", every_n_train_steps=1)

    trainer = quiet(logger=RecordingLogger())
    Tuner(trainer).lr_find(net(Talks), num_training=12)
    assert not (tmp_path / "own").exists()


def test_the_suggestion_is_where_the_loss_falls_fastest() -> None:
    curve = LearningRateCurve("linear", 1.0, 8.0, 8)
    curve.results["lr"] = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]
    curve.results["loss"] = [9.0, 8.9, 8.8, 6.0, 3.0, 2.9, math.inf, 9.0]
    assert curve.suggestion(skip_begin=0, skip_end=1) == 4.0
    assert curve.suggestion(skip_begin=4, skip_end=0) == 5.0
    assert curve.suggestion(skip_begin=0, skip_end=1, method="minimum") == pytest.approx(0.6)
    assert curve.suggestion(skip_begin=10) is None


def test_the_plot_shows_the_curve_and_the_suggestion(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    curve = LearningRateCurve("exponential", 1e-4, 1.0, 20)
    curve.results = {
        "lr": [curve.lr_at(i) for i in range(20)],
        "loss": [20.0 - i if i < 15 else 5.0 for i in range(20)],
    }
    figure = curve.plot(suggest=True)
    axes = figure.axes[0]
    assert axes.get_xscale() == "log"
    assert list(axes.lines[0].get_xdata()) == curve.results["lr"]
    assert axes.lines[1].get_xdata()[0] == curve.suggestion()
    file = tmp_path / "lr.png"
    figure.savefig(file)
    assert file.stat().st_size > 5_000


def test_without_matplotlib_the_plot_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(lw.MissingDependency, match=r"loopwright\[plots\]"):
        LearningRateCurve("linear", 1.0, 2.0, 2).plot()


def test_a_data_module_is_copied() -> None:
    data = Data()
    module = net(Searched)
    Tuner(quiet()).lr_find(module, data, num_training=12)
    assert data.setups == 0
    assert data.__dict__.get("trainer") is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "cubic"}, "mode='cubic'"),
        ({"min_lr": 1.0, "max_lr": 0.1}, "min_lr"),
        ({"num_training": 0}, "num_training=0"),
        ({"early_stop_threshold": 0.5}, "early_stop_threshold"),
        ({"method": "test"}, "method='test'"),
        ({"attr_name": "rate"}, "'rate'"),
        ({"dataloaders": [1]}, "does not take dataloaders"),
        ({"train_dataloaders": iter([1])}, None),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], message: str | None) -> None:
    with pytest.raises(lw.ConfigError if message else lw.DataError, match=message):
        Tuner(quiet()).lr_find(net(Searched), **options)


def test_a_missing_attribute_is_an_attribute_error_too() -> None:
    with pytest.raises(AttributeError, match="'lr' or 'learning_rate'"):
        Tuner(quiet()).lr_find(net(Net), loader())


def test_several_optimizers_and_a_second_finder_are_refused() -> None:
    class Two(Searched):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(self.parameters(), lr=0.1), torch.optim.SGD(self.parameters(), lr=0.1)]

    with pytest.raises(lw.ConfigError, match="made 2"):
        Tuner(quiet()).lr_find(net(Two))
    from loopwright.callbacks import LearningRateFinder

    with pytest.raises(lw.ConfigError, match="search again"):
        Tuner(quiet(callbacks=[LearningRateFinder()])).lr_find(net(Searched))


def test_fast_dev_run_searches_nothing() -> None:
    with pytest.warns(UserWarning, match="fast_dev_run"):
        assert Tuner(quiet(fast_dev_run=True)).lr_find(net(Searched)) is None


def test_a_module_that_cannot_be_copied_is_refused() -> None:
    module = net(Searched)
    module.kept = nn.Linear(1, 1)(torch.ones(1))  # has a graph
    with pytest.raises(lw.ModuleError, match="cannot be copied"):
        Tuner(quiet()).lr_find(module)


def test_an_error_in_a_trial_leaves_nothing_behind_either() -> None:
    class Fails(Searched):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.trainer.global_step == 3:
                raise KeyError("mine")
            return super().training_step(batch, batch_idx)

    module = net(Fails)
    state, before = weights(module), torch.get_rng_state()
    trainer = quiet(max_epochs=1)
    with pytest.raises(KeyError, match="mine"):
        Tuner(trainer).lr_find(module)
    assert_same(module, state)
    assert torch.equal(torch.get_rng_state(), before)
    assert trainer.state.status == "initializing"


class Linear(lw.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("seed", range(3))
def test_the_suggestion_is_not_fooled_by_the_noise_of_small_batches(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(256, 4, generator=generator)
    y = x @ torch.tensor([[1.0], [2.0], [-1.0], [0.5]]) + 0.1 * torch.randn(256, 1, generator=generator)
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=8)
    curve = Tuner(quiet()).lr_find(Linear(), data, max_lr=10, update_attr=False)
    assert curve is not None
    lr = curve.suggestion()
    assert lr is not None
    assert 0.05 < lr < 1.0  # gradient descent on this loss diverges from 2 / its largest curvature, about 1


def test_the_trainer_shows_what_was_searched() -> None:
    module, data, logger = net(Searched), Data(), RecordingLogger()
    trainer = quiet(max_epochs=1, logger=logger)
    Tuner(trainer).lr_find(module, datamodule=data, num_training=3)
    assert trainer.datamodule is data
    assert trainer.lightning_module is module
    assert module.logger is logger
    assert trainer.train_dataloader is not None
