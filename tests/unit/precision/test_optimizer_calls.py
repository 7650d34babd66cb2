"""Steps and zeroing without torch's wrappers do what these do, and leave them in where something listens."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from loopwright.precision.base import clear_gradients, take_step


class Overridden(torch.optim.AdamW):
    def step(self, closure: Any = None) -> Any:
        self.param_groups[0]["lr"] = 0.5
        return super().step(closure)


class OwnZero(torch.optim.SGD):
    zeroed = 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.zeroed += 1
        super().zero_grad(set_to_none)


class Decorated(torch.optim.AdamW):
    @functools.wraps(torch.optim.AdamW.step)  # copies what torch notes on its own wrapper
    def step(self, closure: Any = None) -> Any:
        self.param_groups[0]["lr"] = 0.5
        return super().step(closure)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))


def trained(optimizer: Callable[..., Any], *, is_plain: bool, schedule: Callable[..., Any] | None = None) -> list[Any]:
    module = net()
    steps = optimizer(module.parameters(), lr=0.1)
    stepper = schedule(steps) if schedule is not None else None
    data = torch.randn(6, 8, 4, generator=torch.Generator().manual_seed(1))
    zero = steps.zero_grad if is_plain else clear_gradients(steps)
    for batch in data:
        zero()
        module(batch).square().sum().backward()
        if is_plain:
            steps.step()
        else:
            take_step(steps)
        if stepper is not None:
            stepper.step()
    return [one.detach().clone() for one in module.parameters()]


@pytest.mark.parametrize("schedule", [None, lambda steps: lr_scheduler.StepLR(steps, 2)], ids=["alone", "schedule"])
@pytest.mark.parametrize(
    "optimizer",
    [torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad, Overridden, Decorated],
    ids=lambda cls: cls.__name__,
)
def test_weights_are_those_of_the_plain_calls(optimizer: Any, schedule: Any) -> None:
    expected = trained(optimizer, is_plain=True, schedule=schedule)
    found = trained(optimizer, is_plain=False, schedule=schedule)
    assert all(map(torch.equal, found, expected))


@pytest.fixture
def steps() -> torch.optim.Optimizer:
    module = net()
    module(torch.ones(2, 4)).sum().backward()
    return torch.optim.AdamW(module.parameters())


@pytest.fixture
def regions(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the profiler's regions that were entered."""
    entered: list[str] = []
    real = torch.autograd.profiler.record_function.__init__

    def note(self: Any, name: str, args: Any = None) -> None:
        entered.append(name)
        real(self, name, args)

    monkeypatch.setattr(torch.autograd.profiler.record_function, "__init__", note)
    return entered


def test_nothing_enters_the_profiler_without_one(steps: Any, regions: list[str]) -> None:
    take_step(steps)
    clear_gradients(steps)()
    assert not regions
    assert all(one.grad is None for group in steps.param_groups for one in group["params"])


def test_a_schedule_keeps_the_short_way_and_hears_of_the_step(steps: Any, regions: list[str]) -> None:
    schedule = lr_scheduler.StepLR(steps, 1)
    take_step(steps)
    assert not regions
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns of a schedule that is stepped before its optimizer
        schedule.step()


def test_a_profiler_sees_both(steps: Any) -> None:
    clear = clear_gradients(steps)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        take_step(steps)
        clear()
    names = {event.key for event in profile.key_averages()}
    assert {"Optimizer.step#AdamW.step", "Optimizer.zero_grad#AdamW.zero_grad"} <= names


@pytest.mark.parametrize("kind", ["pre", "post", "all pre", "all post"])
def test_hooks_are_called(steps: Any, kind: str) -> None:
    heard: list[object] = []

    def hook(optimizer: Any, args: Any, kwargs: Any) -> None:
        heard.append(optimizer)

    register = {
        "pre": steps.register_step_pre_hook,
        "post": steps.register_step_post_hook,
        "all pre": register_optimizer_step_pre_hook,
        "all post": register_optimizer_step_post_hook,
    }[kind]
    handle = register(hook)
    take_step(steps)
    handle.remove()
    take_step(steps)
    assert heard == [steps]


def test_a_step_that_was_replaced_is_called(steps: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    steps.step = lambda closure=None: called.append("instance")
    take_step(steps)
    del steps.step
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self, closure=None: called.append("class"))
    take_step(steps)
    assert called == ["instance", "class"]


def test_a_replaced_step_below_a_schedule_is_called(steps: Any) -> None:
    called: list[str] = []
    lr_scheduler.StepLR(steps, 1)
    counted = steps.step
    steps.step = lambda closure=None: (called.append("instance"), counted(closure))
    take_step(steps)
    assert called == ["instance"]


def test_what_only_looks_like_an_optimizer_is_called() -> None:
    class Duck:
        __slots__ = ("calls",)

        def __init__(self) -> None:
            self.calls = 0

        def step(self) -> None:
            self.calls += 1

    duck: Any = Duck()
    take_step(duck)
    assert duck.calls == 1


def test_own_ways_to_zero_are_kept(steps: Any) -> None:
    own = OwnZero(net().parameters(), lr=0.1)
    clear_gradients(own)()
    assert own.zeroed == 1
    steps.zero_grad = lambda: None
    clear_gradients(steps)()
    assert any(one.grad is not None for group in steps.param_groups for one in group["params"])


def test_groups_that_are_added_later_are_zeroed(steps: Any) -> None:
    clear = clear_gradients(steps)
    added = nn.Parameter(torch.ones(2))
    added.grad = torch.ones(2)
    steps.add_param_group({"params": [added]})
    clear()
    assert added.grad is None


class Engine:
    """An optimizer inside an engine: it says that it is the user's, and steps and zeroes by itself."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.called: list[str] = []

    @property  # type: ignore[misc]  # isinstance() reads it
    def __class__(self) -> Any:
        return type(self.optimizer)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)

    def step(self) -> None:
        self.called.append("step")

    def zero_grad(self) -> None:
        self.called.append("zero_grad")


def test_what_says_that_it_is_an_optimizer_is_called() -> None:
    module = net()
    module(torch.ones(2, 4)).sum().backward()
    before = [one.detach().clone() for one in module.parameters()]
    engine = Engine(torch.optim.SGD(module.parameters(), lr=1.0))
    assert isinstance(engine, torch.optim.SGD)
    clear_gradients(engine)()  # type: ignore[unreachable]  # mypy sees no such class
    take_step(engine)
    assert engine.called == ["zero_grad", "step"]
    assert all(one.grad is not None for one in module.parameters())
    assert all(torch.equal(one, other) for one, other in zip(before, module.parameters(), strict=True))


class Demanding(torch.optim.SGD):
    def step(self, closure: Any) -> None:  # type: ignore[override]
        closure()
        super().step()


@pytest.mark.parametrize("is_hooked", [False, True])
def test_a_step_that_requires_a_closure_gets_one_that_computes_nothing(is_hooked: bool) -> None:
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = Demanding([parameter], lr=0.5)
    if is_hooked:
        optimizer.register_step_post_hook(lambda *_: None)
    parameter.grad = torch.ones(1)
    take_step(optimizer)
    assert parameter.item() == 0.5
