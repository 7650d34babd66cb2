"""Schedules against transformers' and torch's, over resumes, and at the edges of their arguments."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LRScheduler, PolynomialLR
from torch.utils.data import DataLoader, IterableDataset
from toys import quiet

import loopwright as lw
from loopwright import schedules

# Any in this file: schedules of transformers, and state dicts.

STEPS, WARMUP = 97, 13
ALL = list(schedules.SCHEDULES.values())


def optimizer(*rates: float) -> SGD:
    return SGD([{"params": [nn.Parameter(torch.ones(1))], "lr": rate} for rate in rates or (1.0,)])


def rates(make: Callable[[Optimizer], LRScheduler], count: int, *targets: float) -> list[list[float]]:
    stepped = optimizer(*targets)
    schedule = make(stepped)
    found = []
    for _ in range(count):
        found.append([group["lr"] for group in stepped.param_groups])
        stepped.step()
        schedule.step()
    return found


def shares(make: Callable[[Optimizer], LRScheduler], count: int) -> list[float]:
    return [one for (one,) in rates(make, count)]


def peers() -> list[tuple[Any, Any, float]]:
    """Give our schedules, transformers', and the tolerance."""
    from transformers import optimization as of

    lengths = {"num_warmup_steps": WARMUP, "num_training_steps": STEPS}
    ours = {"num_steps": STEPS, "warmup": WARMUP}
    wsd = [
        (partial(schedules.wsd, **ours, decay=20, shape=shape, min_lr_ratio=0.1),
         partial(of.get_wsd_schedule, **lengths, num_decay_steps=20, decay_type=theirs, min_lr_ratio=0.1), 0.0)
        for shape, theirs in (("linear", "linear"), ("cosine", "cosine"), ("sqrt", "1-sqrt"))
    ]  # fmt: skip
    return [
        (partial(schedules.cosine, **ours), partial(of.get_cosine_schedule_with_warmup, **lengths), 0.0),
        (partial(schedules.cosine, **ours, min_lr_ratio=0.1),
         partial(of.get_cosine_with_min_lr_schedule_with_warmup, **lengths, min_lr_rate=0.1), 0.0),
        # They divide the steps that are left; ours are 1 minus the share that is done, which rounds once more.
        (partial(schedules.linear, **ours), partial(of.get_linear_schedule_with_warmup, **lengths), 2**-52),
        # They raise to the power, and then divide by the rate.
        (partial(schedules.polynomial, **ours, power=3.0),
         partial(of.get_polynomial_decay_schedule_with_warmup, **lengths, lr_end=0.0, power=3.0), 2**-52),
        (partial(schedules.constant, warmup=WARMUP),
         partial(of.get_constant_schedule_with_warmup, num_warmup_steps=WARMUP), 0.0),
        *wsd,
    ]  # fmt: skip


@pytest.mark.parametrize("number", range(8))
def test_the_rates_are_those_of_transformers(number: int) -> None:
    pytest.importorskip("transformers")
    ours, theirs, tolerance = peers()[number]
    found, expected = (rates(one, STEPS, 0.3, 0.07) for one in (ours, theirs))
    # Theirs begin with a step at the rate 0: in the warm-up ours are one step ahead. Their wsd begins at its minimum.
    if "wsd" not in str(ours):
        assert found[: WARMUP - 1] == expected[1:WARMUP]
    assert found[WARMUP - 1] == [0.3, 0.07]
    for one, two in zip(found[WARMUP:], expected[WARMUP:], strict=True):
        assert one == pytest.approx(two, rel=0, abs=tolerance)


def test_a_polynomial_is_torchs() -> None:
    theirs = shares(partial(PolynomialLR, total_iters=STEPS, power=2.0), STEPS)
    # torch multiplies the rate in each step, and so collects the rounding of a hundred products.
    assert shares(partial(schedules.polynomial, num_steps=STEPS, power=2.0), STEPS) == pytest.approx(theirs, abs=1e-13)


@pytest.mark.parametrize("make", ALL)
def test_the_warm_up_is_the_target_times_t_over_its_length(make: Any) -> None:
    found = shares(partial(make, num_steps=20, warmup=8), 20)
    assert found[:8] == [min(1, t / 8) for t in range(1, 9)]


@pytest.mark.parametrize("make", ALL)
def test_a_share_is_that_part_of_the_run(make: Any) -> None:
    assert shares(partial(make, num_steps=20, warmup=0.25), 20) == shares(partial(make, num_steps=20, warmup=5), 20)


@pytest.mark.parametrize("make", ALL)
@pytest.mark.parametrize("warmup", [0, 0.0])
def test_without_warm_up_the_first_step_has_the_target(make: Any, warmup: float) -> None:
    assert shares(partial(make, num_steps=20, warmup=warmup), 1) == [1.0]


@pytest.mark.parametrize("make", ALL)
def test_a_share_of_one_is_the_whole_run_and_one_is_a_step(make: Any) -> None:
    assert shares(partial(make, num_steps=4, warmup=1.0), 4) == [0.25, 0.5, 0.75, 1.0]
    assert shares(partial(make, num_steps=4, warmup=1), 1) == [1.0]


@pytest.mark.parametrize("make", ALL)
def test_a_run_longer_than_planned_keeps_the_last_rate(make: Any) -> None:
    end = 1.0 if make is schedules.constant else 0.25
    arguments = {} if make is schedules.constant else {"min_lr_ratio": 0.25}
    found = shares(partial(make, num_steps=10, warmup=2, **arguments), 15)
    assert found[10:] == pytest.approx([end] * 5, abs=1e-16)
    assert min(found[2:10]) >= end


@pytest.mark.parametrize("make", ALL)
def test_a_run_shorter_than_its_warm_up_rises_only(make: Any) -> None:
    assert shares(partial(make, num_steps=1, warmup=100), 3) == [0.01, 0.02, 0.03]


def test_the_stable_phase_lasts_until_the_decay() -> None:
    found = shares(partial(schedules.wsd, num_steps=20, warmup=4, decay=0.25), 20)
    assert found[4:16] == [1.0] * 12
    assert found[16:] == pytest.approx([0.8, 0.6, 0.4, 0.2], abs=1e-15)
    assert shares(partial(schedules.wsd, num_steps=4, decay=0.0), 4) == [1.0] * 4
    assert shares(partial(schedules.wsd, num_steps=4, decay=1.0), 4) == shares(
        partial(schedules.linear, num_steps=4), 4
    )


@pytest.mark.parametrize("make", ALL)
def test_the_rule_of_devices_multiplies_the_target(make: Any) -> None:
    one, four = (shares(partial(make, num_steps=10, warmup=3, devices=devices), 10) for devices in (1, 4))
    assert four == [4 * rate for rate in one]


@pytest.mark.parametrize("make", ALL)
def test_schedules_are_pickled_and_copied(make: Any) -> None:
    made = make(optimizer(0.5), 10, warmup=2)
    made.optimizer.step()
    made.step()
    for again in (pickle.loads(pickle.dumps(made)), copy.deepcopy(made)):
        assert again.get_last_lr() == made.get_last_lr()
        assert [again.lr_lambdas[0](step) for step in range(12)] == [made.lr_lambdas[0](step) for step in range(12)]


def test_numbers_of_numpy_are_numbers_and_the_rates_are_pythons() -> None:
    one, count = np.float64(0.25), np.int64(20)
    for make in (
        partial(schedules.cosine, num_steps=count, warmup=np.int64(5), min_lr_ratio=one, devices=np.int64(2)),
        partial(schedules.polynomial, num_steps=np.float64(20), warmup=np.float32(0.25), min_lr_ratio=one, power=one),
        partial(schedules.wsd, num_steps=count, warmup=one, decay=one, shape="sqrt", min_lr_ratio=one),
    ):
        plain = {key: value.item() for key, value in make.keywords.items() if key != "shape"}
        found = shares(make, 25)
        assert found == shares(partial(make, **plain), 25)
        assert {type(rate) for rate in found} == {float}  # a checkpoint holds them


def test_a_stable_phase_without_decay_does_not_end() -> None:
    assert shares(partial(schedules.wsd, num_steps=5, decay=0), 9) == [1.0] * 9


def test_a_group_that_is_added_follows_the_curve() -> None:
    stepped = optimizer(1.0)
    schedule = schedules.cosine(stepped, 20, warmup=4)
    for step in range(25):
        if step in (2, 8):
            rate = stepped.param_groups[0]["lr"]
            stepped.add_param_group({"params": [nn.Parameter(torch.ones(1))], "lr": rate / (step + 1)})
        first, *added = [group["lr"] for group in stepped.param_groups]
        assert added == pytest.approx([first / 3, first / 9][: len(added)], rel=1e-12, abs=1e-18)
        stepped.step()
        schedule.step()


def test_every_wrong_argument_is_named() -> None:
    with pytest.raises(lw.ConfigError, match=r"warmup=1\.5.* decay=-1.* min_lr_ratio=2.* devices=0.* num_steps=-3"):
        schedules.wsd(optimizer(), -3, warmup=1.5, decay=-1, min_lr_ratio=2, devices=0)
    with pytest.raises(lw.ConfigError, match=r"shape='lineer'.*did you mean 'linear'"):
        schedules.wsd(optimizer(), 3, shape="lineer")
    with pytest.raises(lw.ConfigError, match="power=0"):
        schedules.polynomial(optimizer(), 3, power=0)
    with pytest.raises(lw.ConfigError, match=r"num_steps='9'.*|warmup='1'"):
        schedules.cosine(optimizer(), "9", warmup="1")  # type: ignore[arg-type]
    with pytest.raises(lw.ConfigError, match=r"min_lr_ratio='0\.1'"):
        schedules.cosine(optimizer(), 9, min_lr_ratio="0.1")  # type: ignore[arg-type]
    with pytest.raises(lw.ConfigError, match="power='2'"):
        schedules.polynomial(optimizer(), 9, power="2")  # type: ignore[arg-type]
    with pytest.raises(lw.ConfigError, match="optimizer=SGD"):
        schedules.cosine(SGD, 9)  # type: ignore[arg-type]
    with pytest.raises(lw.ConfigError, match="warmup=True"):
        schedules.cosine(optimizer(), 3, warmup=True)


# -- in a Trainer ------------------------------------------------------------------------------------------------------


class Net(lw.Module):
    def __init__(self, make: Any, targets: Sequence[float] = (0.1,)) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(3, 1) for _ in targets)
        self.make, self.targets, self.rates = make, targets, []  # type: ignore[var-annotated]

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.rates.append([group["lr"] for group in self.trainer.optimizers[0].param_groups])
        total: torch.Tensor = sum(layer(batch).square().mean() for layer in self.layers)  # type: ignore[assignment]
        return total

    def configure_optimizers(self) -> Any:
        pairs = zip(self.layers, self.targets, strict=True)
        made = SGD([{"params": layer.parameters(), "lr": rate} for layer, rate in pairs], momentum=0.9)
        return [made], [self.make(made, self.trainer.estimated_stepping_batches)]


def fit(make: Any, steps: int, path: Path | None = None, targets: Sequence[float] = (0.1,), **more: Any) -> Any:
    module, trainer = Net(make, targets), quiet(max_steps=steps, **more)
    trainer.fit(module, DataLoader(torch.linspace(-1, 1, 72).reshape(24, 3), batch_size=2), ckpt_path=path)
    return trainer, module


def test_a_run_steps_it_after_each_optimizer_step_without_interval() -> None:
    _, module = fit(partial(schedules.cosine, warmup=3), 8, targets=(0.1, 0.02))
    assert module.rates == rates(partial(schedules.cosine, num_steps=8, warmup=3), 8, 0.1, 0.02)


def test_micro_batches_of_a_window_have_one_rate() -> None:
    _, module = fit(partial(schedules.linear, warmup=0.5), 4, accumulate_grad_batches=3)
    assert module.rates[::3] == module.rates[2::3] == rates(partial(schedules.linear, num_steps=4, warmup=2), 4, 0.1)


@pytest.mark.parametrize("make", ALL)
def test_a_resumed_run_has_the_same_rates_and_weights(make: Any, tmp_path: Path) -> None:
    made = partial(make, warmup=0.25)
    _, whole = fit(made, 12, targets=(0.1, 0.02))

    def stop(trainer: lw.Trainer, *_: object) -> None:
        if trainer.global_step == 5:
            trainer.save_checkpoint(tmp_path / "five.ckpt")

    fit(made, 12, targets=(0.1, 0.02), callbacks=[lw.LambdaCallback(on_train_batch_end=stop)])
    _, resumed = fit(made, 12, tmp_path / "five.ckpt", targets=(0.1, 0.02))
    assert resumed.rates == whole.rates[5:]
    assert all(torch.equal(value, whole.state_dict()[name]) for name, value in resumed.state_dict().items())


@pytest.mark.parametrize(("make", "same"), [(schedules.cosine, 0), (schedules.wsd, 10)])
def test_a_longer_resume_continues_on_the_longer_curve(make: Any, same: int, tmp_path: Path) -> None:
    trainer, short = fit(partial(make, decay=2) if make is schedules.wsd else make, 12)
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    _, longer = fit(partial(make, decay=2) if make is schedules.wsd else make, 20, tmp_path / "end.ckpt")
    curve = rates(partial(make, num_steps=20, **({"decay": 2} if make is schedules.wsd else {})), 20, 0.1)
    assert longer.rates == curve[12:]
    assert same == 0 or short.rates[:same] == curve[:same]


class Endless(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Any:
        while True:
            yield torch.ones(3)


@pytest.mark.parametrize("make", [schedules.cosine, schedules.wsd, partial(schedules.constant, warmup=0.1)])
def test_a_run_of_unknown_length_names_max_steps(make: Any) -> None:
    with pytest.raises(lw.ConfigError, match=r"known length[\s\S]*max_steps"):
        quiet(max_epochs=1).fit(Net(make), DataLoader(Endless(), batch_size=2))


def test_a_run_of_unknown_length_may_have_a_warm_up_in_steps() -> None:
    module = Net(partial(schedules.constant, warmup=4))
    trainer = quiet(max_epochs=1, limit_train_batches=6)
    trainer.fit(module, DataLoader(Endless(), batch_size=2))
    assert module.rates == [[0.1 * share] for share in (0.25, 0.5, 0.75, 1.0, 1.0, 1.0)]
    assert trainer.global_step == 6
