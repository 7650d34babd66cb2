"""A checkpoint with the score of a validation holds the weights that were validated, whatever hooks change after it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from toys import assert_same, quiet, weights

import loopwright as lw


class Net(lw.Module):
    """Regression in float64, so that a score is one number on every path."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.backbone = nn.Linear(4, 8, dtype=torch.float64)
        self.head = nn.Linear(8, 1, dtype=torch.float64)

    def loss(self, batch: Any) -> Tensor:
        return nn.functional.mse_loss(self.head(self.backbone(batch[0]).tanh()), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("error", self.loss(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([one for one in self.parameters() if one.requires_grad], lr=0.05)


class Shrinking(Net):
    def on_train_epoch_end(self) -> None:
        with torch.no_grad():
            self.backbone.weight.mul_(0.9)


class Shrinks(lw.Callback):
    """Goes around autograd, and so around the versions of tensors."""

    def on_train_epoch_end(self, trainer: lw.Trainer, module: Any) -> None:
        module.backbone.weight.data.mul_(0.9)


class AveragesEpochs(lw.WeightAveraging):
    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        return epoch_idx is not None


def loader() -> DataLoader[Any]:
    x = torch.randn(32, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8)


def pruning(name: str = "l1_unstructured", **options: Any) -> Callable[[], list[lw.Callback]]:
    return lambda: [lw.ModelPruning(name, **{"amount": 0.3, **options})]


CASES: dict[str, tuple[Callable[[], list[lw.Callback]], type[Net]]] = {
    "nothing": (list, Net),
    "pruning": (pruning(), Net),
    "pruning without rewinding": (pruning(use_lottery_ticket_hypothesis=False), Net),
    "pruning after validations": (pruning(prune_on_train_epoch_end=False), Net),
    "pruning of slices": (
        pruning("ln_structured", use_global_unstructured=False, parameter_names=["weight"], pruning_dim=0,
                pruning_norm=2), Net,
    ),
    "pruning at random": (pruning("random_unstructured", make_pruning_permanent=False), Net),
    "an average of steps": (lambda: [lw.EMA(decay=0.9)], Net),
    "an average of steps and epochs": (
        lambda: [lw.EMAWeightAveraging(decay=0.9, update_every_n_steps=2, update_starting_at_epoch=0)], Net,
    ),
    "an average of epochs": (lambda: [AveragesEpochs()], Net),
    "stochastic weight averaging": (lambda: [lw.StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1)], Net),
    "finetuning": (lambda: [lw.BackboneFinetuning(unfreeze_backbone_at_epoch=1)], Net),
    "a callback of the user": (lambda: [Shrinks()], Net),
    "a hook of the module": (list, Shrinking),
    "pruning and an average": (lambda: [*pruning()(), lw.EMA(decay=0.9)], Net),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore:trainer.fit has nothing to do")  # the last file
def test_every_file_has_its_score_and_resumes_exactly(name: str, tmp_path: Path) -> None:
    make_callbacks, kind = CASES[name]

    def make_trainer(folder: Path) -> lw.Trainer:
        save = lw.ModelCheckpoint(folder, monitor="error", save_top_k=-1)
        options = {"enable_checkpointing": True, "num_sanity_val_steps": 0}
        return quiet(max_epochs=3, callbacks=[*make_callbacks(), save], **options)

    trainer, net = make_trainer(tmp_path), kind()
    trainer.fit(net, loader(), loader())
    saved = trainer.checkpoint_callback
    assert isinstance(saved, lw.ModelCheckpoint)
    assert len(saved.best_k_models) == 3
    for number, (path, score) in enumerate(saved.best_k_models.items()):
        [found] = make_trainer(tmp_path).validate(kind(), loader(), ckpt_path=path, verbose=False)
        assert found["error"] == float(score)
        resumed = kind()
        make_trainer(tmp_path / str(number)).fit(resumed, loader(), loader(), ckpt_path=path)
        assert_same(resumed, net)


def test_with_several_validations_in_an_epoch_the_last_one_counts_and_training_keeps_no_copy(tmp_path: Path) -> None:
    kept: list[bool] = []

    class Watched(Shrinking):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            run = self.trainer.present_run()
            assert run is not None
            kept.append(run.validated is not None)

    def make_trainer(**options: Any) -> lw.Trainer:
        save = lw.ModelCheckpoint(tmp_path, monitor="error", save_top_k=-1, save_on_train_epoch_end=True)
        return quiet(callbacks=[save], enable_checkpointing=True, val_check_interval=1, **options)

    for limits in ({"max_epochs": 2}, {"max_steps": 3}):  # the second one ends within an epoch
        trainer = make_trainer(**limits)
        trainer.fit(Watched(), loader(), loader())
        saved = trainer.checkpoint_callback
        assert isinstance(saved, lw.ModelCheckpoint)
        for path, score in saved.best_k_models.items():
            [found] = make_trainer(max_epochs=1).validate(Net(), loader(), ckpt_path=path, verbose=False)
            assert found["error"] == float(score)
    assert kept == [False] * 11


def test_what_nobody_scored_holds_the_weights_of_now(tmp_path: Path) -> None:
    class Saves(lw.Callback):
        def on_train_epoch_end(self, trainer: lw.Trainer, module: Any) -> None:
            trainer.save_checkpoint(tmp_path / "now.ckpt")

    newest = lw.ModelCheckpoint(tmp_path, filename="newest")
    scored = lw.ModelCheckpoint(tmp_path, filename="scored", monitor="error")
    trainer = quiet(max_epochs=1, callbacks=[Shrinks(), Saves(), newest, scored], enable_checkpointing=True)
    net = Net()
    trainer.fit(net, loader(), loader())
    states = {
        name: torch.load(tmp_path / f"{name}.ckpt", weights_only=True)["state_dict"]
        for name in ("now", "newest", "scored")
    }
    assert_same(states["now"], weights(net))
    assert_same(states["newest"], weights(net))
    torch.testing.assert_close(states["scored"]["backbone.weight"] * 0.9, net.backbone.weight.detach())


def test_weights_are_copied_only_where_somebody_may_change_them() -> None:
    class Looks(lw.Callback):
        runs_last = True

        def on_train_epoch_end(self, trainer: lw.Trainer, module: Any) -> None:
            pass

    def keeps(*callbacks: lw.Callback) -> list[bool]:
        seen: list[bool] = []

        class Asks(lw.ModelCheckpoint):
            def on_validation_end(self, trainer: lw.Trainer, module: Any) -> None:
                super().on_validation_end(trainer, module)
                run = trainer.present_run()
                assert run is not None
                seen.append(run.validated is not None)

        save = Asks(monitor="error", save_top_k=0)
        built_in = [lw.EarlyStopping("error"), lw.Timer("00:01:00:00")]
        quiet(max_epochs=1, callbacks=[*built_in, *callbacks, save], enable_checkpointing=True,
              num_sanity_val_steps=0).fit(Net(), loader(), loader())  # fmt: skip
        return seen

    assert keeps() == [False]
    assert keeps(Looks()) == [True]
