"""Optimizers that evaluate the model within their step: the window is evaluated again, exactly, for each call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torchmetrics import SumMetric
from toys import Net, assert_same, loader, net, quiet

import loopwright as lw
from loopwright.errors import ConfigError
from loopwright.precision import MixedPrecision

Closure = Callable[[], Any] | None


class Sam(Optimizer):
    """Sharpness-aware minimization: climbs along the gradients that are there, and steps with those of that point."""

    def __init__(self, params: Any, base: Any = SGD, rho: float = 0.05, **options: Any) -> None:
        super().__init__(params, {"rho": rho, **options})
        self.base = base(self.param_groups, **options)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def first_step(self, zero_grad: bool = False) -> None:
        gradients = [p.grad.norm() for group in self.param_groups for p in group["params"] if p.grad is not None]
        scale = 0.05 / (torch.stack(gradients).norm() + 1e-12)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["old"] = p.data.clone()
                p.data.add_(p.grad * scale)
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad: bool = False) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data = self.state[p]["old"]
        self.base.step()
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def step(self, closure: Closure = None) -> Any:  # type: ignore[override]
        assert closure is not None, "it needs a closure"
        closure = torch.enable_grad()(closure)
        self.first_step(zero_grad=True)
        loss = closure()
        self.second_step()
        return loss


class Extragradient(SGD):
    """Steps to look ahead, and goes back to step with the gradients there."""

    @torch.no_grad()
    def step(self, closure: Closure = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        old = [p.clone() for p in self.param_groups[0]["params"]]
        super().step()
        if closure is not None:
            with torch.enable_grad():
                closure()
        for p, value in zip(self.param_groups[0]["params"], old, strict=True):
            p.copy_(value)
        super().step()
        return loss


class LineSearch(SGD):
    """Halves its step until the loss falls."""

    def step(self, closure: Closure = None) -> Any:  # type: ignore[override]
        if closure is None:
            raise ValueError("it needs a closure")
        loss = closure()
        parameters = self.param_groups[0]["params"]
        old, directions = [p.data.clone() for p in parameters], [p.grad.clone() for p in parameters]
        rate = 1.0
        for _ in range(5):
            for p, value, direction in zip(parameters, old, directions, strict=True):
                p.data = value - rate * direction
            if closure() < loss:
                break
            rate /= 2
        return loss


class Ahead(SGD):
    """Moves before it evaluates, as schedule-free optimizers may."""

    @torch.no_grad()
    def step(self, closure: Closure = None) -> Any:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            p.mul_(0.9)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        super().step()
        return loss


class Wrapper(Optimizer):
    """Hands its closure on to the optimizer within it."""

    def __init__(self, params: Any, **options: Any) -> None:
        self.inner = Sam(params, **options)
        super().__init__(self.inner.param_groups, {})
        self.param_groups, self.state = self.inner.param_groups, self.inner.state

    def step(self, closure: Closure = None) -> Any:  # type: ignore[override]
        return self.inner.step(closure)


EVALUATING = [Sam, Extragradient, LineSearch, Ahead, Wrapper]


class Noted(Net):
    """Draws random numbers, has buffers and a metric object, and logs."""

    def __init__(self, make: Any) -> None:
        super().__init__(lambda parameters: make(parameters, lr=0.05), dropout=0.3, norm=True)
        self.count = SumMetric()
        self.num_steps = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.num_steps += 1
        self.count.update(1)
        loss = self.loss(batch)
        self.log("loss", loss, on_step=False, on_epoch=True)
        self.log("count", self.count, on_step=False, on_epoch=True)
        return loss


def by_hand(make: Any) -> tuple[Noted, float]:
    """Train with windows of two batches; each evaluation draws the same numbers, and buffers count the first."""
    module = net(Noted, make)
    optimizer = module.configure_optimizers()
    batches, losses = list(loader(12)), []
    for start in range(0, 6, 2):
        state: dict[str, Any] = {}

        def evaluate(start: int = start, state: dict[str, Any] = state) -> Tensor:
            is_first = not state
            if is_first:
                state["before"] = (torch.get_rng_state(), [b.clone() for b in module.buffers()])
            torch.set_rng_state(state["before"][0])
            for buffer, value in zip(module.buffers(), state["before"][1], strict=True):
                buffer.copy_(value)
            optimizer.zero_grad()
            means = []
            for batch in batches[start : start + 2]:
                loss = module.loss(batch)
                (loss / 2).backward()
                means.append(loss.detach() / 2)
                if is_first:
                    losses.append(loss.item())
            if is_first:
                state["after"] = (torch.get_rng_state(), [b.clone() for b in module.buffers()])
            torch.set_rng_state(state["after"][0])
            for buffer, value in zip(module.buffers(), state["after"][1], strict=True):
                buffer.copy_(value)
            return torch.stack(means).sum()

        if make is not Ahead:  # its first evaluation is at another point
            evaluate()
        optimizer.step(evaluate)
    return module, sum(losses) / len(losses)


@pytest.mark.parametrize("make", EVALUATING, ids=lambda make: make.__name__)
def test_a_window_is_evaluated_again_with_the_same_numbers(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    reference, loss = by_hand(make)
    module = net(Noted, make)
    trainer = quiet(max_epochs=1, accumulate_grad_batches=2)
    with caplog.at_level("INFO", logger="loopwright"):
        trainer.fit(module, loader(12))
    assert_same(module.state_dict(), reference.state_dict())
    assert (module.num_steps > 6) is (make is not Ahead)
    assert trainer.global_step == 3
    assert trainer.callback_metrics["count"] == 6
    torch.testing.assert_close(trainer.callback_metrics["loss"].item(), loss)  # summed in another order
    assert f"{make.__name__} evaluates the model within its step" in caplog.text


def trained(make: Any, kind: type[Noted] = Noted) -> Noted:
    module = net(kind, make)
    quiet(max_epochs=1).fit(module, loader())
    return module


class Plain(SGD):
    def step(self, closure: Closure = None) -> Any:  # type: ignore[override]
        """Step, after a closure."""
        loss = None
        if closure is not None:
            loss = closure()
        super().step()
        return loss


class WithoutClosure(Extragradient):
    evaluates_closure = False


class TwiceTheSame(Plain):
    evaluates_closure = True


def test_an_optimizer_that_only_opens_with_its_closure_runs_as_any_other(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="loopwright"):
        module = trained(Plain)
    assert_same(module.state_dict(), trained(SGD).state_dict())
    assert module.num_steps == 4
    assert "Plain gets its gradients before its step" in caplog.text


def test_a_declaration_decides() -> None:
    module = trained(TwiceTheSame)
    assert_same(module.state_dict(), trained(SGD).state_dict())
    assert module.num_steps == 8
    assert trained(WithoutClosure).num_steps == 4


def test_an_own_optimizer_step_hands_the_evaluation_on() -> None:
    class Own(Noted):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
            optimizer.step(closure=optimizer_closure)

    assert_same(trained(Extragradient, Own).state_dict(), trained(Extragradient).state_dict())


def test_a_loss_scale_and_a_second_evaluation_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="Sam evaluates the model several times per step, and precision='16-mixed'"):
        quiet(max_epochs=1, precision="16-mixed").fit(net(Noted, Sam), loader())


class Manual(Net):
    """Passes a closure of its own."""

    def __init__(self, make: Any) -> None:
        super().__init__(lambda parameters: make(parameters, lr=0.05))
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()

        def evaluate() -> Tensor:
            optimizer.zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss)
            return loss

        evaluate()
        optimizer.step(evaluate)


@pytest.mark.parametrize("make", [*EVALUATING, SGD], ids=lambda make: make.__name__)
def test_the_closure_of_manual_optimization_reaches_every_optimizer(make: Any) -> None:
    module, reference = net(Manual, make), net(Manual, make)
    optimizer = reference.configure_optimizers()
    for batch in loader():

        def evaluate(batch: Any = batch) -> Tensor:
            optimizer.zero_grad()
            loss = reference.loss(batch)
            loss.backward()
            return loss

        evaluate()
        optimizer.step(evaluate)
    trainer = quiet(max_epochs=1)
    trainer.fit(module, loader())
    assert_same(module.state_dict(), reference.state_dict())
    assert trainer.global_step == 4


@pytest.mark.parametrize("make", [Sam, LineSearch], ids=lambda make: make.__name__)
def test_manual_closures_with_a_loss_scale_are_refused_by_name(make: Any) -> None:
    with pytest.raises(ConfigError, match=f"{make.__name__} cannot be used with precision='16-mixed'"):
        quiet(max_epochs=1, precision="16-mixed").fit(net(Manual, make), loader())


def test_a_manual_closure_with_a_loss_scale_is_called_before_a_plain_step() -> None:
    module, reference = net(Manual, SGD), net(Manual, SGD)
    mixed = MixedPrecision("16-mixed", scaler=torch.amp.GradScaler("cpu", init_scale=8.0))
    quiet(max_epochs=1, plugins=mixed).fit(module, loader())
    quiet(max_epochs=1).fit(reference, loader())
    for own, other in zip(module.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(own, other, rtol=0.02, atol=2e-3)  # float16 products


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
def test_a_closure_reaches_the_optimizer_in_fabric(precision: str) -> None:
    fabric = lw.Fabric(accelerator="cpu", precision=precision)
    fabric.launch()
    calls = []
    model = fabric.setup(nn.Linear(4, 1))
    optimizer = fabric.setup_optimizers(Extragradient(model.parameters(), lr=0.1))

    def evaluate() -> Tensor:
        calls.append(1)
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).square().mean()
        fabric.backward(loss)
        return loss

    if precision == "16-mixed":
        with pytest.raises(ConfigError, match="Extragradient cannot be used with precision='16-mixed'"):
            optimizer.step(evaluate)
        assert not calls
    else:
        optimizer.step(evaluate)
        assert len(calls) == 2


def test_two_steps_by_other_names_count_as_one() -> None:
    class TwoSteps(Manual):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.first_step(zero_grad=True)
            self.manual_backward(self.loss(batch))
            optimizer.second_step(zero_grad=True)

    module, reference = net(TwoSteps, Sam), net(Manual, Sam)
    trainer = quiet(max_steps=4)
    trainer.fit(module, loader())
    quiet(max_epochs=1).fit(reference, loader())
    assert_same(module.state_dict(), reference.state_dict())
    assert trainer.global_step == 4
