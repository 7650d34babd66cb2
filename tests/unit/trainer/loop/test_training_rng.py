"""The order of training samples depends on the seed, the epoch and training alone, whatever else draws in between."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from toys import quiet

import loopwright as lw
from loopwright.tuner import Tuner

Between = Callable[[lw.Trainer, "Net", Any], object]


class Net(lw.Module):
    """Notes the samples of each training batch; every evaluation step draws from the global generator."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))
        self.dropout = torch.nn.Dropout(dropout)
        self.lr = 0.1
        self.seen: list[list[float]] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.seen.append(batch.tolist())
        return (self.weight * self.dropout(batch)).mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("error", batch.mean() + torch.rand(()))

    test_step = validation_step

    def predict_step(self, batch: Tensor, batch_idx: int) -> float:
        return float(torch.rand(()))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class Seeding(Net):
    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        torch.manual_seed(3)


def training_data(**options: Any) -> DataLoader[Any]:
    return DataLoader(torch.arange(10.0), batch_size=2, shuffle=True, **options)


def other_data(**options: Any) -> DataLoader[Any]:
    return DataLoader(torch.arange(6.0), batch_size=2, **options)


def by_hand(epochs: int = 2) -> list[list[float]]:
    torch.manual_seed(7)
    loader = training_data()
    return [batch.tolist() for _ in range(epochs) for batch in loader]


def nothing(*_: Any) -> None:
    pass


def two_fits(*, before: Between = nothing, between: Between = nothing) -> list[list[float]]:
    """Return the samples of two fits of one epoch each."""
    torch.manual_seed(7)
    trainer, net, loader = quiet(max_epochs=1), Net(), training_data()
    before(trainer, net, loader)
    trainer.fit(net, loader, other_data())
    between(trainer, net, loader)
    trainer.max_epochs = 2
    trainer.fit(net, loader, other_data())
    return net.seen


def validates(trainer: lw.Trainer, net: Net, loader: Any) -> None:
    trainer.validate(net, other_data(), verbose=False)


def evaluates(trainer: lw.Trainer, net: Net, loader: Any) -> None:
    trainer.test(net, other_data(), verbose=False)
    trainer.predict(net, loader)  # which shuffles


def evaluates_elsewhere(trainer: lw.Trainer, net: Net, loader: Any) -> None:
    quiet().test(net, other_data(), verbose=False)


def evaluates_with_a_seed(trainer: lw.Trainer, net: Net, loader: Any) -> None:
    trainer.test(Seeding(), other_data(), verbose=False)


def trains_another(trainer: lw.Trainer, net: Net, loader: Any) -> None:
    quiet(max_epochs=1, limit_val_batches=0).fit(Net(), training_data())


def draws(trainer: lw.Trainer, net: Net, loader: Any) -> None:
    torch.rand(3)


@pytest.mark.parametrize(
    "between",
    [nothing, validates, evaluates, evaluates_elsewhere, evaluates_with_a_seed, trains_another, draws],
    ids=lambda between: between.__name__,
)
def test_what_happens_between_two_fits_leaves_the_order_alone(between: Between) -> None:
    assert two_fits(between=between) == by_hand()


def finds_a_learning_rate(trainer: lw.Trainer, net: Net, loader: Any) -> None:
    Tuner(trainer).lr_find(net, loader, num_training=3, early_stop_threshold=None, update_attr=False)
    net.seen.clear()


@pytest.mark.parametrize(
    "before",
    [validates, evaluates, evaluates_elsewhere, finds_a_learning_rate],
    ids=lambda before: before.__name__,
)
def test_what_comes_before_the_first_fit_leaves_the_order_alone(before: Between) -> None:
    assert two_fits(before=before) == by_hand()


def test_a_new_seed_between_two_fits_begins_another_order() -> None:
    seen = two_fits(between=lambda *_: torch.manual_seed(8))
    assert seen[:5] == by_hand()[:5]
    torch.manual_seed(8)
    assert seen[5:] == [batch.tolist() for batch in training_data()]


def test_predictions_at_random_differ_from_call_to_call_and_repeat_with_the_seed() -> None:
    net, trainer = Net(), quiet()
    torch.manual_seed(1)
    first = trainer.predict(net, other_data())
    assert trainer.predict(net, other_data()) != first
    assert quiet().predict(net, other_data()) != first
    torch.manual_seed(1)
    assert trainer.predict(net, other_data()) == first


class EvaluatesElsewhere(lw.Callback):
    """Uses a second Trainer within the hooks of the first."""

    def on_train_batch_end(self, trainer: lw.Trainer, module: Any, *args: Any) -> None:
        quiet().predict(copy.deepcopy(module), other_data())

    def on_train_epoch_end(self, trainer: lw.Trainer, module: Any) -> None:
        quiet(max_epochs=1, limit_val_batches=0).fit(Net(), training_data())


def test_a_second_trainer_within_a_hook_leaves_the_numbers_of_training_alone() -> None:
    def train(*callbacks: lw.Callback) -> Net:
        torch.manual_seed(7)
        net = Net(dropout=0.5)
        quiet(max_epochs=2, limit_val_batches=0, callbacks=list(callbacks)).fit(net, training_data())
        return net

    alone, watched = train(), train(EvaluatesElsewhere())
    assert watched.seen == alone.seen
    assert torch.equal(watched.weight, alone.weight)  # the dropout, too


@pytest.mark.parametrize(
    "options",
    [
        {"num_sanity_val_steps": 0}, {"num_sanity_val_steps": 2}, {"limit_val_batches": 1}, {"val_check_interval": 2},
        {"reload_dataloaders_every_n_epochs": 1},
    ],
    ids=str,
)  # fmt: skip
def test_validations_leave_the_order_alone(options: dict[str, Any]) -> None:
    class BuildsAtRandom(Net):
        def val_dataloader(self) -> Any:
            torch.rand(5)
            return other_data(shuffle=True)

    torch.manual_seed(7)
    net = BuildsAtRandom()
    quiet(max_epochs=2, **options).fit(net, training_data())
    assert net.seen == by_hand()


def fit_with_one_generator(folder: Path, ckpt_path: Path | None = None, **options: Any) -> tuple[Net, lw.Trainer]:
    """Train with one generator in both loaders, as recipes for reproducible runs have it."""
    generator = torch.Generator().manual_seed(3)
    net = Net()
    save = lw.ModelCheckpoint(folder, filename="{step}", save_top_k=-1, save_on_train_epoch_end=False)
    trainer = quiet(max_epochs=3, callbacks=[save], enable_checkpointing=True, **options)
    loaders = (training_data(generator=generator), other_data(shuffle=True, generator=generator))
    trainer.fit(net, *loaders, ckpt_path=ckpt_path)
    return net, trainer


def test_a_generator_of_both_loaders_goes_on_in_training_as_if_there_were_no_validation(tmp_path: Path) -> None:
    loader = training_data(generator=torch.Generator().manual_seed(3))
    wanted = [batch.tolist() for _ in range(3) for batch in loader]
    all_options: list[dict[str, Any]] = [
        {"num_sanity_val_steps": 0}, {"val_check_interval": 2}, {"limit_val_batches": 0},
    ]  # fmt: skip
    for number, options in enumerate(all_options):
        assert fit_with_one_generator(tmp_path / str(number), **options)[0].seen == wanted
    # A checkpoint that is taken at the end of a validation holds the generator as training has it.
    resumed, _ = fit_with_one_generator(tmp_path / "resumed", tmp_path / "1" / "step=7.ckpt")
    assert resumed.seen == wanted[7:]
