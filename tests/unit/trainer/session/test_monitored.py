"""Monitored names are checked before an epoch has been spent."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from toys import Net, loader, quiet

import loopwright as lw
from loopwright.errors import ModuleError


class Validated(Net):
    steps = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        type(self).steps += 1
        loss = super().training_step(batch, batch_idx)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", 1.0)


def fit(module: lw.Module, *callbacks: lw.Callback, validates: bool = True, **arguments: Any) -> None:
    trainer = quiet(
        **{"max_epochs": 1, "num_sanity_val_steps": 1, "log_every_n_steps": 1, "logger": False, **arguments},
        callbacks=list(callbacks),
    )
    trainer.fit(module, loader(8), loader(4) if validates else None)


def stopping(name: str, **arguments: Any) -> lw.EarlyStopping:
    return lw.EarlyStopping(name, **arguments)


def test_a_misspelled_name_of_validation_ends_the_run_before_its_first_step() -> None:
    Validated.steps = 0
    with pytest.raises(ModuleError, match=r"monitors 'val_los' \(did you mean 'val_loss'\?\)"):
        fit(Validated(), stopping("val_los"))
    assert Validated.steps == 0


def test_a_schedule_is_checked_too() -> None:
    class Scheduled(Validated):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val_losss"}}

    with pytest.raises(ModuleError, match=r"schedule ReduceLROnPlateau monitors 'val_losss'"):
        fit(Scheduled())


def test_a_name_of_validation_without_validation_says_so_at_the_first_step() -> None:
    Validated.steps = 0
    with (
        pytest.warns(UserWarning, match="validation is skipped"),
        pytest.raises(ModuleError, match=r"'val_acc'.*there is no validation"),
    ):
        fit(Validated(), stopping("val_acc"), validates=False)
    assert Validated.steps == 1


def test_an_epoch_without_a_logged_step_says_so_at_its_end() -> None:
    with (
        pytest.warns(UserWarning, match="validation is skipped"),
        pytest.raises(ModuleError, match=r"'val_loss', which was not logged in training, and there is no validation"),
    ):
        fit(Validated(), stopping("val_loss"), validates=False, log_every_n_steps=50)


def test_a_misspelled_name_of_training_is_warned_of_at_the_first_step() -> None:
    with (
        pytest.warns(UserWarning, match=r"monitors 'train_los' \(did you mean 'train_loss'"),
        pytest.raises(ModuleError, match="no metric of this name"),
    ):
        fit(Validated(), stopping("train_los"))


def test_a_name_that_only_later_validations_log_is_left_alone() -> None:
    class Later(Validated):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            super().validation_step(batch, batch_idx)
            if not self.trainer.sanity_checking:
                self.log("val_loss2", 1.0)

    with pytest.warns(UserWarning, match="'val_loss2'"):  # it looks misspelled, and is not refused
        fit(Later(), stopping("val_loss2"))


def test_a_name_that_is_logged_at_the_epochs_end_is_left_alone() -> None:
    class AtEnd(Validated):
        def on_train_epoch_end(self) -> None:
            self.log("accuracy", 1.0)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit(AtEnd(), stopping("accuracy"))


@pytest.mark.parametrize("name", ["val_loss", "train_loss"])
def test_names_that_are_logged_pass(name: str) -> None:
    fit(Validated(), stopping(name))


def test_without_strictness_nothing_is_said() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit(Validated(), stopping("val_los", strict=False))
