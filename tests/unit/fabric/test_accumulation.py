from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, IterableDataset

from loopwright.errors import ConfigError
from loopwright.fabric import Fabric
from loopwright.fabric.accumulation import Accumulation

DATA = torch.randn(7, 3, generator=torch.Generator().manual_seed(1))


class Stream(IterableDataset[Tensor]):
    """Data whose length nobody knows."""

    def __iter__(self) -> Iterator[Tensor]:
        return iter(DATA)


LOADERS = {
    "sized": lambda: DataLoader(DATA, batch_size=1),
    "list": lambda: list(DATA.split(1)),
    "unsized": lambda: DataLoader(Stream(), batch_size=1),
    "plain": lambda: DataLoader(DATA, batch_size=1),
}


def train(kind: str, steps: int, *, zero_first: bool = False, precision: Any = None) -> tuple[Tensor, list[bool]]:
    """Train for an epoch of 7 micro-batches as in a loop in the manner of Accelerate."""
    torch.manual_seed(0)
    fabric, net = Fabric(accelerator="cpu", precision=precision), nn.Linear(3, 1)
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9))
    loader = LOADERS[kind]()
    synced = []
    for batch in loader if kind == "plain" else fabric.setup_dataloaders(loader):
        with fabric.accumulate(model, steps=steps):
            if zero_first:
                optimizer.zero_grad()
            fabric.backward(model(batch).pow(2).mean())
            if fabric.sync_gradients:
                fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            if not zero_first:
                optimizer.zero_grad()
        synced.append(fabric.sync_gradients)
    return net.weight.detach(), synced


def by_hand(windows: list[int]) -> Tensor:
    torch.manual_seed(0)
    net = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)
    batches = iter(DATA.split(1))
    for size in windows:
        for _ in range(size):
            (net(next(batches)).pow(2).mean() / size).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return net.weight.detach()


@pytest.mark.parametrize("zero_first", [False, True])
@pytest.mark.parametrize("kind", ["sized", "list"])
def test_the_last_window_of_an_epoch_is_shorter_and_weighs_its_losses_so(kind: str, zero_first: bool) -> None:
    weight, synced = train(kind, 4, zero_first=zero_first)
    assert synced == [False, False, False, True, False, False, True]
    assert torch.equal(weight, by_hand([4, 3]))


def test_where_the_end_comes_unforeseen_gradients_are_scaled_up() -> None:
    weight, synced = train("unsized", 4)
    assert synced == [False, False, False, True, False, False, True]
    torch.testing.assert_close(weight, by_hand([4, 3]), rtol=1e-6, atol=1e-7)  # 1/4 and then 4/3, rather than 1/3


def test_a_loss_scale_does_not_disturb_accumulation() -> None:
    weight, _ = train("sized", 4, precision="16-mixed")
    torch.testing.assert_close(weight, by_hand([4, 3]), rtol=1e-2, atol=1e-2)  # products in float16


def test_one_step_per_batch_is_a_plain_loop() -> None:
    weight, synced = train("sized", 1)
    assert all(synced)
    assert torch.equal(weight, by_hand([1] * 7))


def test_without_a_loader_of_ours_windows_go_on_into_the_next_epoch() -> None:
    _, synced = train("plain", 4)
    assert synced == [False, False, False, True, False, False, False]


def test_models_are_counted_by_themselves() -> None:
    windows, one, two = Accumulation(), nn.Linear(1, 1), nn.Linear(1, 1)
    assert [windows.next_batch((one,), 2, None).is_last for _ in range(3)] == [False, True, False]
    assert windows.next_batch((two,), 2, None).is_last is False
    assert windows.next_batch((one, two), 1, None).is_last is True


def test_a_schedule_given_to_setup_waits_for_the_step() -> None:
    fabric, net = Fabric(accelerator="cpu"), nn.Linear(3, 1)
    optimizer: Any = torch.optim.SGD(net.parameters(), lr=1.0)
    model, optimizer, schedule = fabric.setup(net, optimizer, scheduler=LambdaLR(optimizer, lambda n: 0.5**n))
    rates = []
    for batch in fabric.setup_dataloaders(DataLoader(DATA, batch_size=1)):
        with fabric.accumulate(model, steps=3):
            fabric.backward(model(batch).sum())
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == [1, 1, 0.5, 0.5, 0.5, 0.25, 0.125]


def test_a_loop_that_leaves_a_window_open_steps_again_with_a_warning() -> None:
    fabric, net = Fabric(accelerator="cpu"), nn.Linear(3, 1)
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=1.0))
    with fabric.accumulate(model, steps=3):
        fabric.backward(model(DATA).sum())
        optimizer.step()
    assert optimizer.num_steps == 0
    with pytest.warns(UserWarning, match="after 1 of 3 micro-batches"):
        optimizer.step()
    optimizer.step()
    assert optimizer.num_steps == 2
    assert fabric.sync_gradients


@pytest.mark.parametrize("steps", [0, -1, 1.5, True, None])
def test_steps_is_an_integer(steps: Any) -> None:
    fabric = Fabric(accelerator="cpu")
    with pytest.raises(ConfigError, match="integer >= 1, got steps="), fabric.accumulate(nn.Linear(1, 1), steps=steps):
        pass


def test_a_model_is_needed() -> None:
    with pytest.raises(ConfigError, match="Expected a model"), Fabric(accelerator="cpu").accumulate():
        pass


@pytest.mark.parametrize("saves", ["window", "last", "after", "weights", "manual"])
def test_a_save_that_would_lose_gradients_is_refused(saves: str, tmp_path: Any) -> None:
    fabric, net = Fabric(accelerator="cpu"), nn.Linear(3, 1)
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.5))
    state = {"model": model} if saves == "weights" else {"model": model, "optimizer": optimizer}

    def save() -> None:
        fabric.save(tmp_path / "a.ckpt", state)

    if saves == "manual":
        with fabric.no_backward_sync(model):
            fabric.backward(model(DATA[:1]).mean())
        with pytest.warns(UserWarning, match="a resumed run lacks them"):
            save()
        optimizer.step()
        save()
        return
    for number in range(2):
        with fabric.accumulate(model, steps=2):
            fabric.backward(model(DATA[:1]).mean())
            if saves == "last" and fabric.sync_gradients:
                with pytest.raises(ConfigError, match="after 2 of 2 micro-batches"):
                    save()
            optimizer.step()
            optimizer.zero_grad()
        if saves == "window" and not number:
            with pytest.raises(ConfigError, match="after 1 of 2 micro-batches, before the optimizer's step"):
                save()
        elif saves in ("window", "after", "weights") and (number or saves == "weights"):
            save()
