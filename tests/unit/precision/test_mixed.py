from __future__ import annotations

import io
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.amp import GradScaler

from loopwright.errors import CheckpointError, ConfigError
from loopwright.precision import MixedPrecision


def scaled(**kwargs: Any) -> MixedPrecision:
    return MixedPrecision("16-mixed", "cpu", GradScaler("cpu", **{"init_scale": 1024.0, **kwargs}))


def backward(precision: MixedPrecision, module: nn.Module, x: torch.Tensor) -> None:
    with precision.forward_context():
        loss = module(x).float().pow(2).mean()
    precision.scale_loss(loss).backward()


def test_bf16_runs_autocast_and_has_no_scaler() -> None:
    precision = MixedPrecision("bf16-mixed", "cpu")
    module = nn.Linear(3, 2)
    assert precision.convert_module(module) is module
    with precision.forward_context():
        assert module(torch.ones(1, 3)).dtype is torch.bfloat16
    assert module.weight.dtype is torch.float32
    assert not precision.has_scaler
    assert precision.scale is None
    assert precision.state_dict() == {}
    assert not precision.converts_input
    loss = torch.ones(())
    assert precision.scale_loss(loss) is loss


def test_fp16_on_the_cpu_is_float16_and_not_bfloat16() -> None:
    precision = MixedPrecision("16-mixed", "cpu")
    with precision.forward_context():
        assert nn.Linear(3, 2)(torch.ones(1, 3)).dtype is torch.float16
    assert precision.has_scaler
    assert precision.scale == 65536.0
    assert precision.convert_output(torch.ones(1, dtype=torch.float16)).dtype is torch.float32


def test_autocast_contexts_nest() -> None:
    precision = MixedPrecision("bf16-mixed", "cpu")
    with precision.forward_context():
        with precision.forward_context():
            pass
        assert torch.is_autocast_enabled("cpu")
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("unscale_first", [False, True])
def test_an_infinite_gradient_skips_the_step_and_halves_the_scale(fused: bool, unscale_first: bool) -> None:
    precision, module = scaled(), nn.Linear(3, 2)
    optimizer = torch.optim.Adam(module.parameters(), lr=0.1, fused=fused)
    backward(precision, module, torch.randn(4, 3))
    assert precision.optimizer_step(optimizer) is True
    before = [p.detach().clone() for p in module.parameters()]
    moment = optimizer.state[module.weight]["exp_avg"].clone()
    backward(precision, module, torch.randn(4, 3))
    module.weight.grad[0, 0] = float("inf")
    if unscale_first:
        precision.unscale_gradients(optimizer)
        nn.utils.clip_grad_norm_(module.parameters(), 0.5)
    assert precision.optimizer_step(optimizer) is False
    assert all(torch.equal(p, q) for p, q in zip(module.parameters(), before, strict=True))
    assert torch.equal(optimizer.state[module.weight]["exp_avg"], moment)
    assert int(optimizer.state[module.weight]["step"]) == 1
    assert precision.scale == 512.0


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("clip", [False, True])
def test_steps_equal_a_hand_written_loop(fused: bool, clip: bool) -> None:
    def run(by_hand: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.05, fused=fused)
        precision, scaler = scaled(growth_interval=3), GradScaler("cpu", init_scale=1024.0, growth_interval=3)
        for _ in range(8):
            x = torch.randn(4, 3)
            optimizer.zero_grad()
            if by_hand:
                with torch.autocast("cpu", dtype=torch.float16):
                    loss = module(x).float().pow(2).mean()
                scaler.scale(loss).backward()
                if clip:
                    scaler.unscale_(optimizer)
                    nn.utils.clip_grad_norm_(module.parameters(), 0.01)
                scaler.step(optimizer)
                scaler.update()
                continue
            backward(precision, module, x)
            if clip:
                precision.unscale_gradients(optimizer)
                precision.unscale_gradients(optimizer)
                nn.utils.clip_grad_norm_(module.parameters(), 0.01)
            assert precision.optimizer_step(optimizer)
        assert by_hand or precision.scale == 4096.0
        return [p.detach() for p in module.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(run(True), run(False), strict=True))


def test_clipping_after_unscale_bounds_the_true_norm() -> None:
    torch.manual_seed(0)
    precision, module = scaled(init_scale=8.0), nn.Linear(3, 2)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    backward(precision, module, 100 * torch.randn(4, 3))
    precision.unscale_gradients(optimizer)
    nn.utils.clip_grad_norm_(module.parameters(), 0.5)
    before = [p.detach().clone() for p in module.parameters()]
    precision.optimizer_step(optimizer)
    change = torch.cat([(p - q).flatten() for p, q in zip(module.parameters(), before, strict=True)]).norm()
    torch.testing.assert_close(change, torch.tensor(0.5), rtol=1e-4, atol=0)


def test_inf_in_one_of_several_micro_batches_skips_the_window_once() -> None:
    precision, module = scaled(), nn.Linear(3, 2)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    before = module.weight.detach().clone()
    for index in range(4):
        backward(precision, module, torch.full((2, 3), float("inf") if index == 1 else 1.0))
    assert precision.optimizer_step(optimizer) is False
    assert torch.equal(module.weight, before)
    assert precision.scale == 512.0


def test_two_optimizers_divide_by_the_same_scale() -> None:
    precision, one, two = scaled(), nn.Linear(2, 1, bias=False), nn.Linear(2, 1, bias=False)
    first, second = torch.optim.SGD(one.parameters(), lr=1.0), torch.optim.SGD(two.parameters(), lr=1.0)
    start = two.weight.detach().clone()
    x = torch.ones(1, 2)
    precision.scale_loss(one(x).sum() + two(x).sum()).backward()
    one.weight.grad[0, 0] = float("inf")
    assert precision.optimizer_step(first) is False
    assert precision.optimizer_step(second) is True
    torch.testing.assert_close(start - two.weight.detach(), torch.ones(1, 2))  # gradient 1, though the scale is halved
    assert precision.scale == 512.0


def test_gradients_that_were_unscaled_and_never_used_do_not_spoil_the_next_step() -> None:
    precision, module = scaled(), nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    for _ in range(2):
        optimizer.zero_grad()
        precision.scale_loss(module(torch.ones(1, 2)).sum()).backward()
        precision.unscale_gradients(optimizer)
        torch.testing.assert_close(module.weight.grad, torch.ones(1, 2))
    assert precision.optimizer_step(optimizer)


def test_a_step_without_gradients_is_a_step_that_does_nothing() -> None:
    precision, module = scaled(), nn.Linear(2, 1)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    precision.unscale_gradients(optimizer)
    assert precision.optimizer_step(optimizer) is True
    assert precision.scale == 1024.0


def test_a_closure_is_called_once_before_the_step() -> None:
    precision, module = scaled(), nn.Linear(3, 1)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    calls = []

    def closure() -> None:
        calls.append(1)
        backward(precision, module, torch.ones(2, 3))

    before = module.weight.detach().clone()
    assert precision.optimizer_step(optimizer, closure) is True
    assert calls == [1]
    assert not torch.equal(module.weight, before)


def test_lbfgs_has_no_loss_scale() -> None:
    module = nn.Linear(2, 1)
    optimizer = torch.optim.LBFGS(module.parameters())
    with pytest.raises(ConfigError, match="LBFGS cannot be used with precision='16-mixed'"):
        scaled().optimizer_step(optimizer, lambda: None)
    MixedPrecision("bf16-mixed", "cpu").check_optimizer(optimizer)


def test_lbfgs_runs_with_bf16() -> None:
    module, precision = nn.Linear(2, 1), MixedPrecision("bf16-mixed", "cpu")
    optimizer = torch.optim.LBFGS(module.parameters(), lr=0.1)
    losses = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        with precision.forward_context():
            loss = module(torch.ones(4, 2)).float().pow(2).mean()
        loss.backward()
        losses.append(loss.item())
        return loss

    assert precision.optimizer_step(optimizer, closure) is True
    assert losses[-1] < losses[0]


def test_an_optimizer_that_unscales_within_its_step_cannot_be_clipped() -> None:
    class Own(torch.optim.SGD):
        _step_supports_amp_scaling = True

        def step(self, closure: Any = None, grad_scaler: Any = None) -> None:  # type: ignore[override]
            pass

    module, precision = nn.Linear(2, 1), scaled()
    optimizer = Own(module.parameters(), lr=0.1)
    backward(precision, module, torch.ones(1, 2))
    with pytest.raises(ConfigError, match="inside its step"):
        precision.unscale_gradients(optimizer)


def test_a_scaler_that_is_switched_off_steps_plainly() -> None:
    module, precision = nn.Linear(2, 1), MixedPrecision("16-mixed", "cpu", GradScaler("cpu", enabled=False))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    before = module.weight.detach().clone()
    backward(precision, module, torch.ones(1, 2))
    precision.unscale_gradients(optimizer)
    assert precision.optimizer_step(optimizer) is True
    assert not torch.equal(before, module.weight)
    assert precision.state_dict() == {}
    precision.load_state_dict({})


def test_the_state_is_plain_and_goes_on_exactly() -> None:
    precision, module = scaled(growth_interval=3), nn.Linear(2, 1)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(5):
        backward(precision, module, torch.ones(1, 2))
        precision.optimizer_step(optimizer)
    file = io.BytesIO()
    torch.save(precision.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    assert state["scale"] == 2048.0
    assert state["_growth_tracker"] == 2
    again = MixedPrecision("16-mixed", "cpu")
    again.load_state_dict(state)
    assert again.state_dict() == precision.state_dict()


def test_a_state_that_is_loaded_right_after_a_step_replaces_it() -> None:
    precision, module = scaled(), nn.Linear(2, 1)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    state = precision.state_dict()
    backward(precision, module, torch.full((1, 2), torch.inf))
    assert not precision.optimizer_step(optimizer)
    precision.load_state_dict(state)
    assert precision.state_dict() == state
    optimizer.zero_grad()
    backward(precision, module, torch.ones(1, 2))
    precision.unscale_gradients(optimizer)
    assert precision.optimizer_step(optimizer)


def test_a_state_of_another_precision_is_an_error() -> None:
    with pytest.raises(CheckpointError, match="holds no loss scale"):
        scaled().load_state_dict({})
    with pytest.raises(CheckpointError, match="holds a loss scale"):
        MixedPrecision("bf16-mixed", "cpu").load_state_dict({"scale": 2.0})


def test_wrong_arguments_are_errors() -> None:
    with pytest.raises(ConfigError, match="did you mean '16-mixed'"):
        MixedPrecision("16-mixd", "cpu")
    with pytest.raises(ConfigError, match="leave the scaler out"):
        MixedPrecision("bf16-mixed", "cpu", GradScaler("cpu"))


def test_teardown_makes_the_change_that_is_due() -> None:
    precision, module = scaled(growth_interval=1), nn.Linear(2, 1)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    backward(precision, module, torch.ones(1, 2))
    precision.optimizer_step(optimizer)
    precision.teardown()
    assert precision.scaler is not None
    assert precision.scaler.get_scale() == 2048.0


@pytest.mark.parametrize("make", [lambda: MixedPrecision("bf16-mixed", "cpu"), scaled])
def test_it_goes_to_another_process_without_its_optimizers(make: Any) -> None:
    precision, module = make(), nn.Linear(3, 2)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(2):
        backward(precision, module, torch.ones(1, 3))
        assert precision.optimizer_step(optimizer)
        precision.teardown()
        precision = pickle.loads(pickle.dumps(precision))
    assert precision.scale in (None, 1024.0)
