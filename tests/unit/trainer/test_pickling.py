"""A Trainer after a run can be pickled, and trains again."""

from __future__ import annotations

import io
import pickle
from pathlib import Path

import torch
from toys import ValidatedNet, adam, loader, net, quiet

import loopwright as lw


def test_a_trainer_is_pickled_after_fit_with_its_counts_module_and_metrics(tmp_path: Path) -> None:
    trainer = quiet(
        max_epochs=2, enable_checkpointing=True, callbacks=[lw.EarlyStopping("val_loss"), lw.ModelCheckpoint(tmp_path)]
    )
    module = net(ValidatedNet, adam)
    trainer.fit(module, loader(), loader())
    again = pickle.loads(pickle.dumps(trainer))
    assert (again.global_step, again.current_epoch) == (8, 2)
    assert torch.equal(again.callback_metrics["val_loss"], trainer.callback_metrics["val_loss"])
    assert torch.equal(again.lightning_module.net[0].weight, module.net[0].weight)
    assert again.num_val_batches == [4]
    assert again.checkpoint_callback.best_model_path == trainer.checkpoint_callback.best_model_path
    assert trainer.model is module  # the pickled one is as it was


def test_a_trainer_that_was_pickled_trains(tmp_path: Path) -> None:
    file = io.BytesIO()
    torch.save(quiet(max_epochs=1), file)
    file.seek(0)
    trainer = torch.load(file, weights_only=False)
    trainer.fit(net(ValidatedNet), loader(), loader())
    assert trainer.global_step == 4
