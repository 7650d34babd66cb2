"""`Trainer(global_batch_size=)` on one rank, and the line about the global batch at the start of fit."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from toys import Net, Recorder, Unsized, assert_same, loader, net, quiet

import loopwright as lw
from loopwright.callbacks import BatchSizeFinder, GradientAccumulationScheduler
from loopwright.data import CombinedLoader
from loopwright.errors import ConfigError
from loopwright.tuner import Tuner


class Data(lw.DataModule):
    def __init__(self, batch_size: int) -> None:
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self) -> Any:
        return loader(16, self.batch_size)


class Growing(lw.DataModule):
    """Loaders whose batch size doubles when they are opened again."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_size = 1

    def train_dataloader(self) -> Any:
        self.batch_size *= 2
        return loader(16, self.batch_size)


def test_the_accumulation_is_that_of_the_argument() -> None:
    first, second = net(), net()
    quiet(max_epochs=2, accumulate_grad_batches=4).fit(first, loader(16, 2))
    trainer = quiet(max_epochs=2, global_batch_size=8)
    trainer.fit(second, datamodule=Data(2))
    assert trainer.accumulate_grad_batches == 4
    assert trainer.global_batch_size == 8
    assert trainer.global_step == 4
    assert_same(first, second)


def test_reloaded_loaders_keep_the_global_batch() -> None:
    sizes = Recorder(lambda trainer: (trainer.current_epoch, trainer.accumulate_grad_batches))
    trainer = quiet(max_epochs=3, global_batch_size=8, reload_dataloaders_every_n_epochs=1, callbacks=[sizes])
    trainer.fit(net(), datamodule=Growing())
    assert sorted(set(sizes.notes)) == [(0, 4), (1, 2), (2, 1)]
    assert trainer.global_step == 6


def test_the_estimate_counts_the_derived_accumulation() -> None:
    class Planned(Net):
        def configure_optimizers(self) -> Any:
            self.total = self.trainer.estimated_stepping_batches
            return super().configure_optimizers()

    module = Planned()
    trainer = quiet(max_epochs=3, global_batch_size=8)
    trainer.fit(module, loader(16, 2))
    assert module.total == trainer.global_step == 6


def test_a_resume_with_another_batch_size_keeps_the_global_batch(tmp_path: Path) -> None:
    whole = net()
    quiet(max_epochs=2, global_batch_size=8).fit(whole, loader(16, 4))
    half = net()
    trainer = quiet(max_epochs=1, global_batch_size=8)
    trainer.fit(half, loader(16, 4))
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    rest = net()
    trainer = quiet(max_epochs=2, global_batch_size=8)
    trainer.fit(rest, loader(16, 2), ckpt_path=tmp_path / "half.ckpt")
    assert (trainer.accumulate_grad_batches, trainer.global_step) == (4, 4)
    for one, other in zip(whole.parameters(), rest.parameters(), strict=True):
        torch.testing.assert_close(one, other)  # the same mean, added up in another order


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (loader(16, 3), r"a multiple of 3 \(3 samples per micro-batch x 1 rank"),
        (Unsized([torch.ones(2, 4)]), "got Unsized"),
        (CombinedLoader({"a": loader(8, 2), "b": loader(8, 4)}), "batch sizes 2, 4"),
    ],
)
def test_what_cannot_work_is_refused_before_training(data: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        quiet(max_epochs=1, global_batch_size=8).fit(net(), data)


def test_two_rules_for_accumulation_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"global_batch_size=8 and accumulate_grad_batches=2"):
        quiet(global_batch_size=8, accumulate_grad_batches=2)
    with pytest.raises(ConfigError, match="GradientAccumulationScheduler"):
        quiet(global_batch_size=8, callbacks=[GradientAccumulationScheduler({0: 2})])

    class Scheduled(Net):
        def configure_callbacks(self) -> Any:
            return GradientAccumulationScheduler({0: 2})

    with pytest.raises(ConfigError, match="GradientAccumulationScheduler"):
        quiet(global_batch_size=8, max_epochs=1).fit(net(Scheduled), loader())

    class Manual(Net):
        automatic_optimization = False

    with pytest.raises(ConfigError, match="global_batch_size=8"):
        quiet(global_batch_size=8, max_epochs=1).fit(net(Manual), loader())


def test_a_search_for_the_batch_size_keeps_the_global_batch() -> None:
    trainer = quiet(max_epochs=1, global_batch_size=8, callbacks=[BatchSizeFinder(init_val=1, max_trials=2)])
    data = Data(2)
    trainer.fit(net(), datamodule=data)
    assert data.batch_size * trainer.accumulate_grad_batches == 8
    assert data.batch_size > 1


def test_a_search_for_the_rate_accumulates_as_training_does() -> None:
    trainer = quiet(max_epochs=1, global_batch_size=8)
    module = net()
    module.lr = 0.1
    finder = Tuner(trainer).lr_find(module, datamodule=Data(2), num_training=4, update_attr=False)
    reference = Tuner(quiet(max_epochs=1, accumulate_grad_batches=4)).lr_find(
        module, datamodule=Data(2), num_training=4, update_attr=False
    )
    assert finder is not None
    assert reference is not None
    assert finder.results == reference.results


def test_the_first_lines_of_fit_say_the_global_batch(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    line = "lobal batch: 2 samples x 3 micro-batches x 1 rank = 6 samples per step"
    quiet(max_epochs=1, accumulate_grad_batches=3, enable_model_summary=True).fit(net(), loader())
    assert capsys.readouterr().out.count(line) == 1
    with caplog.at_level(logging.INFO):
        quiet(max_epochs=1, accumulate_grad_batches=3).fit(net(), loader())
    assert [record.getMessage() for record in caplog.records if line in record.getMessage()] == [f"G{line}"]
    assert line not in capsys.readouterr().out


def test_a_schedule_of_accumulation_is_reported_with_its_epoch(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        quiet(max_epochs=1, callbacks=[GradientAccumulationScheduler({0: 2})]).fit(net(), loader())
    assert "2 samples x 2 micro-batches x 1 rank = 4 samples per step in epoch 0" in caplog.text
