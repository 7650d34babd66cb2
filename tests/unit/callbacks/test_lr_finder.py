"""LearningRateFinder: training goes on with what was found, and a resumed run with the same."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from searched import Searched
from toys import Recorder, assert_same, net, quiet, weights

import loopwright as lw
from loopwright.callbacks import BatchSizeFinder, LearningRateFinder

pytestmark = pytest.mark.usefixtures("few_objects")  # a search collects garbage after each trial


def finder(**options: Any) -> LearningRateFinder:
    return LearningRateFinder(**{"min_lr": 1e-4, "max_lr": 0.5, "num_training_steps": 20, **options})


def fit(module: Any, callback: Any, **options: Any) -> lw.Trainer:
    trainer = quiet(**{"max_epochs": 1, "callbacks": callback, **options})
    torch.manual_seed(5)
    trainer.fit(module, ckpt_path=options.get("ckpt_path"))
    return trainer


def test_training_uses_the_suggestion_and_equals_one_that_began_with_it() -> None:
    found, callback = net(Searched), finder()
    fit(found, callback)
    assert callback.optimal_lr is not None
    lr = callback.optimal_lr.suggestion()
    assert found.lr == lr
    assert set(found.rates) == {lr}
    given = net(Searched, lr=lr)
    fit(given, [])
    assert_same(found, given)
    assert found.sizes == given.sizes


def test_schedules_are_made_from_what_was_found() -> None:
    class Warm(Searched):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.7)
            total = int(self.trainer.estimated_stepping_batches)
            schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=self.lr, total_steps=total)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    module, callback = net(Warm), finder()
    trainer = fit(module, callback)
    assert trainer.lr_scheduler_configs[0].scheduler.total_steps == 16
    assert max(module.rates) == pytest.approx(module.lr, rel=0.05)


def test_without_update_attr_nothing_changes() -> None:
    module, callback = net(Searched), finder(update_attr=False)
    fit(module, callback)
    assert callback.optimal_lr is not None
    assert set(module.rates) == {0.5}


def test_a_resumed_run_does_not_search_again(tmp_path: Path) -> None:
    whole, callback = net(Searched), finder()
    fit(whole, callback, max_steps=12, max_epochs=-1)
    part = net(Searched)
    first = fit(part, finder(), max_steps=7, max_epochs=-1)
    first.save_checkpoint(tmp_path / "part.ckpt")
    again, resumed = net(Searched, lr=0.3), finder()
    trainer = quiet(max_steps=12, max_epochs=-1, callbacks=[resumed])
    trainer.fit(again, ckpt_path=tmp_path / "part.ckpt")
    assert_same(again, whole)
    assert again.lr == whole.lr
    assert resumed.optimal_lr == callback.optimal_lr
    assert len(again.rates) == 5


def test_a_second_fit_goes_on_without_a_search() -> None:
    module, callback = net(Searched), finder()
    trainer = fit(module, callback)
    curve = callback.optimal_lr
    trainer.max_epochs = 2
    trainer.fit(module)
    assert callback.optimal_lr is curve


def test_a_subclass_searches_at_milestones_and_scales_what_is_under_way() -> None:
    class Twice(LearningRateFinder):
        def on_train_epoch_start(self, trainer: lw.Trainer, pl_module: Any) -> None:
            if trainer.current_epoch == 1:
                self.lr_find(trainer, pl_module)

    class Cosine(Searched):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]

    module = net(Cosine)
    callback = Twice(min_lr=1e-4, max_lr=0.5, num_training_steps=20)
    trainer = fit(module, [callback], max_epochs=3)
    assert module.rates[16] == pytest.approx(module.lr)
    assert module.rates[32] == pytest.approx(module.lr / 2)
    assert trainer.global_step == 48
    momenta = [s["momentum_buffer"] for s in trainer.optimizers[0].state.values()]
    assert all(m.abs().sum() > 0 for m in momenta)


@pytest.mark.parametrize("callback", [finder(), BatchSizeFinder(steps_per_trial=2)])
def test_a_signal_ends_the_search_and_the_run(callback: Any) -> None:
    class Asked(Searched):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if not self.sizes:
                os.kill(os.getpid(), signal.SIGTERM)
            return super().training_step(batch, batch_idx)

    module = net(Asked)
    state = weights(module)
    with pytest.raises(lw.StopBySignal):
        fit(module, callback)
    assert_same(module, state)
    assert (module.lr, module.batch_size, module.rates) == (0.5, 4, [])


def test_other_callbacks_and_counts_see_nothing_of_the_search() -> None:
    recorder = Recorder(lambda trainer: trainer.global_step)
    module, callback = net(Searched), finder()
    trainer = quiet(max_epochs=1, callbacks=[recorder, callback])
    assert trainer.callbacks == [callback, recorder]
    trainer.fit(module)
    assert recorder.notes == list(range(1, 17))
    assert recorder.seen.count("train_start") == 1


def test_bad_input_is_refused() -> None:
    with pytest.raises(lw.ConfigError, match="mode='steep'"):
        LearningRateFinder(mode="steep")
    with pytest.raises(lw.ConfigError, match="'rate'"):
        fit(net(Searched), finder(attr_name="rate"))
    with pytest.warns(UserWarning, match="fast_dev_run"):
        fit(net(Searched), finder(), fast_dev_run=True)

    class Late(LearningRateFinder):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.lr_find(trainer, pl_module)

    with pytest.raises(lw.ConfigError, match="within an epoch"):
        fit(net(Searched), Late(num_training_steps=5))


def test_two_finders_keep_their_own_state() -> None:
    assert finder().state_key != finder(attr_name="other").state_key
    assert finder().state_dict() == {}
