"""`compute_gradients` leaves the gradients that `loss.backward()` leaves, and lets torch decide what is not plain."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from loopwright.precision.base import compute_gradients


class Own(Tensor):
    """A subclass that notes its backward passes."""

    passes = 0

    def backward(self, *args: Any, **kwargs: Any) -> None:
        Own.passes += 1
        super().backward(*args, **kwargs)


class Listening(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.heard: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.heard.append(getattr(func, "__name__", ""))
        return func(*args, **(kwargs or {}))


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))


def gradients(compute: Callable[[Tensor], None], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    module = net().to(dtype)
    data = torch.randn(5, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float32).to(dtype)
    for _ in range(2):  # the second pass adds
        compute(module(data).square().mean())
    return [parameter.grad for parameter in module.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_gradients_are_those_of_backward(dtype: torch.dtype) -> None:
    ours, theirs = gradients(compute_gradients, dtype), gradients(Tensor.backward, dtype)
    assert len(ours) == 4
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


def test_a_plain_loss_takes_fewer_calls_than_backward() -> None:
    def count(compute: Callable[[Tensor], None]) -> int:
        loss = net()(torch.ones(2, 4)).sum()
        calls = 0

        def note(frame: Any, event: str, argument: Any) -> None:
            nonlocal calls
            calls += event == "call"

        sys.setprofile(note)
        try:
            compute(loss)
        finally:
            sys.setprofile(None)
        return calls

    assert count(compute_gradients) * 2 < count(Tensor.backward)


def test_arguments_are_passed_on() -> None:
    weight = torch.ones(3, requires_grad=True)
    loss = (weight * 2).sum()
    compute_gradients(loss, retain_graph=True)
    compute_gradients(loss, torch.tensor(3.0))
    assert weight.grad is not None
    assert weight.grad.tolist() == [8.0] * 3


def test_the_method_of_a_subclass_is_called() -> None:
    Own.passes = 0
    loss = torch.ones(2, requires_grad=True).sum().as_subclass(Own)
    compute_gradients(loss)
    assert Own.passes == 1


def test_a_mode_hears_of_the_backward_pass() -> None:
    loss = torch.ones(2, requires_grad=True).sum()
    with Listening() as mode:
        compute_gradients(loss)
    assert "backward" in mode.heard


def test_a_replaced_backward_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[Tensor] = []
    monkeypatch.setattr(Tensor, "backward", lambda self: called.append(self))
    loss = torch.ones(2, requires_grad=True).sum()
    compute_gradients(loss)
    assert len(called) == 1
    assert called[0] is loss


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: torch.ones(2, requires_grad=True) * 2, "scalar outputs"),
        (lambda: torch.tensor(1.0), "does not require grad"),
        (lambda: torch.ones((), dtype=torch.complex64, requires_grad=True) * 2, "real"),
    ],
)
def test_errors_are_those_of_torch(make: Callable[[], Tensor], words: str) -> None:
    with pytest.raises(RuntimeError, match=words):
        compute_gradients(make())


def test_a_hook_that_changes_its_gradient_does_not_reach_the_next_pass() -> None:
    weight = torch.ones(2, requires_grad=True)
    for _ in range(2):
        weight.grad = None
        loss = weight.sum()
        loss.register_hook(lambda gradient: gradient.mul_(5))  # in place, which nobody should do
        compute_gradients(loss)
        assert weight.grad is not None
        assert weight.grad.tolist() == [5.0, 5.0]
