"""Steps that a module makes itself count: for limits, rows, schedules of saves, EarlyStopping, and resuming."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from toys import RecordingLogger, assert_same, loader, quiet

import loopwright as lw

pytestmark = pytest.mark.filterwarnings("ignore:configure_optimizers returned None")


class Owning(lw.Module):
    """Steps an optimizer of its own, which `configure_optimizers` does not return, and saves its state itself."""

    def __init__(self, *, automatic: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.automatic_optimization = automatic
        self.layer = nn.Linear(4, 1)
        self.own = torch.optim.SGD(self.layer.parameters(), lr=0.05, momentum=0.9)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = nn.functional.mse_loss(self.layer(batch[0]), batch[1])
        self.log("loss", loss)
        self.own.zero_grad()
        loss.backward()
        self.own.step()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("error", 1.0)

    def configure_optimizers(self) -> Any:
        return None

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["own"] = self.own.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.own.load_state_dict(checkpoint["own"])


class Returning(Owning):
    """Returns its optimizer, and steps it as it is: not through `self.optimizers()`."""

    def configure_optimizers(self) -> Any:
        return self.own

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        pass

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        pass


class Managed(Returning):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        loss = nn.functional.mse_loss(self.layer(batch[0]), batch[1])
        self.log("loss", loss)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()


KINDS: dict[str, Any] = {
    "none, automatic": lambda: Owning(automatic=True),
    "none, manual": lambda: Owning(automatic=False),
    "returned, stepped as it is": lambda: Returning(automatic=False),
    "returned, managed": lambda: Managed(automatic=False),
}
kinds = pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)


@kinds
def test_each_batch_is_a_step_and_has_its_row(make: Any) -> None:
    logger = RecordingLogger()
    trainer, net = quiet(max_epochs=3, max_steps=9, logger=logger, log_every_n_steps=2, limit_val_batches=0), make()
    trainer.fit(net, loader(8, 2))
    assert (trainer.global_step, trainer.progress.total_batches, trainer.progress.skipped_steps) == (9, 9, 0)
    assert [step for step, row in logger.rows if "loss" in row] == [1, 3, 5, 7]
    by_hand = Owning(automatic=False)
    batches = [batch for _ in range(3) for batch in loader(8, 2)][:9]
    for batch in batches:
        by_hand.own.zero_grad()
        nn.functional.mse_loss(by_hand.layer(batch[0]), batch[1]).backward()
        by_hand.own.step()
    assert_same(net, by_hand)


@kinds
def test_callbacks_hear_of_every_validation(make: Any, tmp_path: Path) -> None:
    stops = lw.EarlyStopping("error", patience=1)
    every = lw.ModelCheckpoint(tmp_path / "every", "{step}", every_n_train_steps=3, save_top_k=-1)
    scored = lw.ModelCheckpoint(tmp_path / "scored", "{step}", monitor="error", save_top_k=-1)
    rates = lw.LearningRateMonitor()
    logger = RecordingLogger()
    callbacks: list[lw.Callback] = [stops, every, scored, rates]
    trainer = quiet(max_epochs=9, callbacks=callbacks, enable_checkpointing=True, logger=logger, log_every_n_steps=1)
    net = make()
    trainer.fit(net, loader(8, 2), loader(8, 2))
    assert (trainer.current_epoch, trainer.global_step, stops.stopped_epoch) == (2, 8, 1)
    assert sorted(path.name for path in (tmp_path / "every").iterdir()) == ["step=3.ckpt", "step=6.ckpt"]
    assert sorted(path.name for path in (tmp_path / "scored").iterdir()) == ["step=4.ckpt", "step=8.ckpt"]
    assert any("lr-SGD" in row for _, row in logger.rows) == bool(trainer.optimizers)


@kinds
def test_a_resumed_run_counts_on_and_ends_with_the_same_weights(make: Any, tmp_path: Path) -> None:
    def train(folder: Path, ckpt_path: Path | None = None) -> tuple[lw.Trainer, Any]:
        save = lw.ModelCheckpoint(folder, "{step}", every_n_train_steps=3, save_top_k=-1)
        trainer, net = quiet(max_epochs=2, callbacks=[save], enable_checkpointing=True, val_check_interval=3), make()
        trainer.fit(net, loader(8, 2), loader(4, 2), ckpt_path=ckpt_path)
        return trainer, net

    whole, net = train(tmp_path / "whole")
    trainer, resumed = train(tmp_path / "resumed", tmp_path / "whole" / "step=3.ckpt")
    assert trainer.global_step == whole.global_step == 8
    assert trainer.progress.validated_at == whole.progress.validated_at == 7
    assert_same(resumed, net)


def test_a_batch_without_a_step_is_none(tmp_path: Path) -> None:
    class EverySecond(Owning):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx % 2:
                super().training_step(batch, batch_idx)

    for automatic in (True, False):
        trainer = quiet(max_epochs=1, limit_val_batches=0)
        trainer.fit(EverySecond(automatic=automatic), loader(8, 2))
        assert trainer.global_step == 2


def test_other_optimizers_do_not_count_and_nothing_watches_after_fit() -> None:
    class WithProbe(Managed):
        """Fits something else beside, which is not the module's."""

        def __init__(self) -> None:
            super().__init__(automatic=False)
            self.probe = [nn.Parameter(torch.ones(1))]
            self.beside = torch.optim.SGD(self.probe, lr=0.1)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            (self.probe[0] ** 2).sum().backward()
            self.beside.step()

    trainer, net = quiet(max_epochs=1, limit_val_batches=0), WithProbe()
    trainer.fit(net, loader(8, 2))
    assert trainer.global_step == 0
    from torch.optim import optimizer as torch_optimizer

    assert not torch_optimizer._global_optimizer_post_hooks
    assert not torch_optimizer._global_optimizer_pre_hooks


def test_an_optimizer_beside_the_configured_one_is_said_to_be_in_no_checkpoint() -> None:
    class Two(Managed):
        def __init__(self) -> None:
            super().__init__(automatic=False)
            self.head = nn.Linear(1, 1)
            self.own_head = torch.optim.SGD(self.head.parameters(), lr=0.1)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss: Tensor = self.head(self.layer(batch[0])).mean()
            loss.backward()
            self.own_head.step()

    trainer = quiet(max_epochs=1, limit_val_batches=0)
    with pytest.warns(UserWarning, match="SGD steps parameters of the module, and configure_optimizers did not return"):
        trainer.fit(Two(), loader(8, 2))
    assert trainer.global_step == 4
