"""Trials of a search: what a user sees of them."""

from __future__ import annotations

import logging

import pytest
from searched import Searched

import loopwright as lw
from loopwright.tuner import Tuner

pytestmark = pytest.mark.usefixtures("few_objects")  # a search collects garbage after each trial


def test_trials_tell_nothing_of_themselves(caplog: pytest.LogCaptureFixture) -> None:
    module = Searched()
    trainer = lw.Trainer(max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False)
    with caplog.at_level(logging.INFO, logger="loopwright"):
        Tuner(trainer).scale_batch_size(module, steps_per_trial=1, max_trials=2)
        Tuner(trainer).lr_find(module, num_training=4)
    told = [record.getMessage() for record in caplog.records]
    assert not [line for line in told if line.startswith(("Training", "Checkpoints", "Logs", "Global batch"))], told
    with caplog.at_level(logging.INFO, logger="loopwright"):
        trainer.fit(module)
    assert any(record.getMessage().startswith("Training ended") for record in caplog.records)
