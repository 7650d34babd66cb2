"""BatchSizeFinder: a verb uses what was found, and a resumed training the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from searched import Searched
from toys import assert_near, assert_same, loader, net, quiet

import loopwright as lw
from loopwright.callbacks import BatchSizeFinder

pytestmark = pytest.mark.usefixtures("few_objects")  # a search collects garbage after each trial


def test_fit_reads_batches_of_the_size_found() -> None:
    module, callback = net(Searched), BatchSizeFinder()
    trainer = quiet(max_epochs=1, callbacks=[callback], num_sanity_val_steps=1)
    trainer.fit(module)
    assert callback.optimal_batch_size == module.batch_size == 16
    assert set(module.sizes) == {16}
    assert trainer.global_step == 4


def test_schedules_count_the_new_batches() -> None:
    class Counts(Searched):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=self.lr)
            total = int(self.trainer.estimated_stepping_batches)
            schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=self.lr, total_steps=total)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    module = net(Counts)
    trainer = quiet(max_epochs=1, callbacks=[BatchSizeFinder()])
    trainer.fit(module)
    assert trainer.lr_scheduler_configs[0].scheduler.total_steps == 4


def test_training_equals_one_that_began_with_the_size() -> None:
    found, given = net(Searched), net(Searched, batch_size=16)
    for module, callbacks in ((found, [BatchSizeFinder()]), (given, [])):
        torch.manual_seed(5)
        quiet(max_epochs=1, callbacks=callbacks).fit(module)
    assert_same(found, given)


def test_the_global_batch_and_so_the_training_stay() -> None:
    class Even(Searched):
        def __init__(self, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            self.net[2] = torch.nn.Identity()  # no dropout: it draws by micro-batch

    cut, whole = net(Even, batch_size=32), net(Even, batch_size=16)
    trainer = quiet(max_epochs=1, callbacks=[BatchSizeFinder(keep_global_batch=True)])
    trainer.fit(cut)
    assert (cut.batch_size, trainer.accumulate_grad_batches, trainer.global_step) == (16, 2, 2)
    quiet(max_epochs=1, accumulate_grad_batches=2).fit(whole)
    assert_near(cut, whole, rtol=1e-6)


def test_a_resumed_run_goes_on_with_the_size_found(tmp_path: Path) -> None:
    options: dict[str, Any] = {"mode": "binsearch", "margin": 0.5, "keep_global_batch": True}

    def trained(module: Any, steps: int, ckpt_path: Path | None = None) -> lw.Trainer:
        torch.manual_seed(5)
        trainer = quiet(max_steps=steps, callbacks=[BatchSizeFinder(**options)])
        trainer.fit(module, ckpt_path=ckpt_path)
        return trainer

    whole, part, again = (net(Searched, batch_size=20) for _ in range(3))
    trained(whole, 6)
    trained(part, 2).save_checkpoint(tmp_path / "part.ckpt")
    trainer = trained(again, 6, tmp_path / "part.ckpt")
    assert_same(again, whole)
    assert again.batch_size == whole.batch_size
    assert trainer.accumulate_grad_batches == 20 // again.batch_size
    assert len(part.sizes) + len(again.sizes) == len(whole.sizes)


@pytest.mark.parametrize("verb", ["validate", "predict"])
def test_other_verbs_search_too(verb: str) -> None:
    module = net(Searched)
    callback = BatchSizeFinder(mode="binsearch", margin=0)
    trainer = quiet(callbacks=[callback])
    getattr(trainer, verb)(module, **({"verbose": False} if verb == "validate" else {}))
    assert callback.optimal_batch_size == 20
    assert set(module.sizes) == {20, 4}
    assert callback.state_dict() == {}


def test_a_subclass_searches_between_epochs() -> None:
    class Later(BatchSizeFinder):
        def on_fit_start(self, trainer: lw.Trainer, pl_module: Any) -> None:
            pass

        def on_train_epoch_start(self, trainer: lw.Trainer, pl_module: Any) -> None:
            if trainer.current_epoch == 1:
                self.scale_batch_size(trainer, pl_module)

    module = net(Searched)
    trainer = quiet(max_epochs=3, callbacks=[Later()], limit_val_batches=0)
    trainer.fit(module)
    assert module.sizes == [4] * 16 + [16] * 8
    assert trainer.global_step == 24


def test_the_batch_size_comes_before_the_learning_rate() -> None:
    from loopwright.callbacks import LearningRateFinder

    module = net(Searched)
    callbacks = [lw.ModelSummary(), BatchSizeFinder(), LearningRateFinder(num_training_steps=15)]
    trainer = quiet(max_epochs=1, callbacks=callbacks, limit_val_batches=0)
    trainer.callbacks.remove(callbacks[0])
    trainer.fit(module)
    assert set(module.sizes) == {16}
    assert set(module.rates) == {module.lr}
    assert module.lr != 0.5


def test_bad_input_is_refused() -> None:
    with pytest.raises(lw.ConfigError, match="mode='x'.*max_val=0"):
        BatchSizeFinder(mode="x", max_val=0)
    with pytest.raises(lw.ConfigError, match="was given loaders"):
        quiet(max_epochs=1, callbacks=[BatchSizeFinder()]).fit(net(Searched), loader())
    with pytest.raises(lw.ConfigError, match="'size'"):
        quiet(max_epochs=1, callbacks=[BatchSizeFinder(batch_arg_name="size")]).fit(net(Searched))
    with pytest.warns(UserWarning, match="fast_dev_run"):
        quiet(fast_dev_run=True, callbacks=[BatchSizeFinder()]).fit(net(Searched))
