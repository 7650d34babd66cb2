"""The batch-size search: always a size that was tried and fits, and nothing left behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from searched import BATCH, Data, Searched
from torch.utils.data import DataLoader
from toys import Net, assert_same, loader, net, pairs, quiet, weights

import loopwright as lw
from loopwright.strategies.construction.activation_checkpointing import is_checkpointed
from loopwright.tuner import Tuner
from loopwright.tuner.trial import Subject, kept_weights

pytestmark = pytest.mark.usefixtures("few_objects")  # a search collects garbage after each trial


def search(module: Any = None, trainer: lw.Trainer | None = None, **options: Any) -> int | None:
    return Tuner(trainer or quiet()).scale_batch_size(module if module is not None else net(Searched), **options)


def test_power_returns_the_largest_doubling_that_was_tried_and_fits() -> None:
    module = net(Searched)
    assert search(module) == 16
    assert module.batch_size == 16


def test_binsearch_closes_the_gap_and_leaves_a_margin() -> None:
    assert search(mode="binsearch", margin=0.0) == BATCH
    assert search(mode="binsearch", margin=0.1) == 18


def test_a_trial_checkpoints_activations_as_the_training_does_and_does_not_shrink_its_batches() -> None:
    class Frugal(Searched):
        checkpointed: list[bool] = []  # of the class: trials have copies of the module

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.checkpointed.append(any(map(is_checkpointed, self.modules())))
            return super().training_step(batch, batch_idx)

    assert search(net(Frugal), quiet(activation_checkpointing={"Linear"}, on_oom="shrink")) == 16
    assert all(Frugal.checkpointed)


def test_a_first_size_that_does_not_fit_is_halved() -> None:
    assert search(init_val=50) == 12
    assert search(init_val=50, mode="binsearch", margin=0) == BATCH


@pytest.mark.parametrize("mode", ["power", "binsearch"])
def test_the_data_and_max_val_are_limits_without_a_margin(mode: str) -> None:
    assert search(net(Searched, count=11), mode=mode) == 11
    assert search(max_val=6, mode=mode) == 6


def test_the_number_of_trials_is_a_limit() -> None:
    assert search(max_trials=2) == 4


def test_hyperparameters_and_data_modules_are_set() -> None:
    module = net(Searched, hyper=True)
    search(module)
    assert module.hparams.batch_size == 16
    data = Data()
    plain = net(Net)
    assert search(plain, datamodule=data, max_val=8) == data.batch_size == 8
    assert data.setups == 0


@pytest.mark.parametrize(("method", "stage"), [("validate", "val"), ("predict", "predict")])
def test_other_verbs_can_be_searched_for(method: str, stage: str) -> None:
    module = net(Searched)
    assert search(module, method=method) == 16


def test_the_global_batch_is_kept_by_accumulation() -> None:
    module, trainer = net(Searched, batch_size=48), quiet()
    assert search(module, trainer, mode="binsearch", margin=0, keep_global_batch=True) == 16  # divides 48, fits in 20
    assert (module.batch_size, trainer.accumulate_grad_batches) == (16, 3)


def test_weights_shared_with_a_trial_come_back_bit_by_bit() -> None:
    module = net(Searched)
    module.net[0].weight.requires_grad_(False)
    module.net[-1].bias.data.fill_(float("nan"))
    state = weights(module)
    storage = [p.data_ptr() for p in module.parameters()]
    first = next(module.parameters())
    subject = Subject(quiet(), module)
    with kept_weights(module):
        twin, _ = subject.twins(shares_weights=True)
        assert next(twin.parameters()) is first
        for parameter in twin.parameters():
            parameter.data.add_(1)
            parameter.requires_grad_(True)
        twin.double()
    assert [p.data_ptr() for p in module.parameters()] == storage
    assert not module.net[0].weight.requires_grad
    for name, value in module.state_dict().items():
        assert torch.equal(value.nan_to_num(7.0), state[name].nan_to_num(7.0))


def test_after_a_fit_a_search_changes_no_weights() -> None:
    module, trainer = net(Searched), quiet(max_epochs=1)
    trainer.fit(module)
    state, steps = weights(module), trainer.global_step
    search(module, trainer)
    assert_same(module, state)
    assert trainer.global_step == steps


def test_another_error_is_raised_as_it_is() -> None:
    class Fails(Searched):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if len(batch[0]) >= 8:
                raise KeyError("mine")
            return super().training_step(batch, batch_idx)

    module = net(Fails)
    with pytest.raises(KeyError, match="mine"):
        search(module)
    assert module.batch_size == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "guess"}, "mode='guess'"),
        ({"margin": 1.0}, "margin=1.0"),
        ({"init_val": 0, "max_trials": 0}, "init_val=0.*max_trials=0"),
        ({"method": "fitt"}, "did you mean 'fit'"),
        ({"batch_arg_name": "batchsize"}, "did you mean 'batch_size'"),
        ({"train_dataloaders": loader()}, "was given loaders"),
        ({"method": "validate", "dataloaders": loader()}, "was given loaders"),
        ({"method": "validate", "train_dataloaders": loader()}, "does not take train_dataloaders"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(lw.ConfigError, match=message):
        search(**options)


def test_loaders_that_ignore_the_size_are_found_out() -> None:
    class Fixed(Searched):
        def train_dataloader(self) -> Any:
            return DataLoader(pairs(64), batch_size=4)

    with pytest.raises(lw.ModuleError, match="does not use batch_size"):
        search(net(Fixed))


def test_nothing_fits() -> None:
    class Full(Searched):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(lw.ConfigError, match="no size that fits.*is 1"):
        search(net(Full))


def test_keeping_the_global_batch_needs_the_trainers_accumulation() -> None:
    trainer = quiet(callbacks=[lw.GradientAccumulationScheduler({0: 2})])
    with pytest.raises(lw.ConfigError, match="GradientAccumulationScheduler"):
        search(trainer=trainer, keep_global_batch=True)


def test_two_values_of_one_name_are_said() -> None:
    module = net(Searched, hyper=True)
    module.batch_size = 8
    with pytest.warns(UserWarning, match="several values"):
        search(module)
    assert module.batch_size == module.hparams.batch_size == 16
