"""Adaptive clipping: the gradients of a loop over units, in Trainer and Fabric, without reads of the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conformance import clip_adaptively_by_hand
from torch import Tensor, nn
from torch.optim import SGD
from toys import loader, quiet

import loopwright as lw
from loopwright.strategies.adaptive_clipping import clip_adaptively

SHAPES = [(8, 4), (5,), (4, 3, 3, 3), (1,), (2, 2, 2)]


class Weights(nn.Module):
    def __init__(self, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        values = [torch.randn(shape, generator=generator) * scale for shape in SHAPES] + [torch.zeros(3, 2)]
        self.all = nn.ParameterList(nn.Parameter(one.to(dtype)) for one in values)
        for one in self.all:
            one.grad = torch.randn(one.shape, generator=generator).to(dtype)


def gradients(module: nn.Module) -> list[Tensor]:
    return [one.grad for one in module.parameters() if one.grad is not None]


@pytest.mark.parametrize("scale", [1e-4, 1e-2, 1.0, 1e4])
def test_each_unit_is_limited_by_its_weights(scale: float) -> None:
    ours, expected = Weights(scale), Weights(scale)
    clip_adaptively(SGD(ours.parameters()), 0.01)
    clip_adaptively_by_hand(expected, 0.01)
    for one, two in zip(gradients(ours), gradients(expected), strict=True):
        # The reference multiplies by numbers of Python, in float64.
        torch.testing.assert_close(one, two, rtol=1e-6, atol=0)


def test_gradients_below_the_limit_keep_their_bits_and_zeros_stay() -> None:
    module, before = Weights(1e4), Weights(1e4)
    module.all[0].grad[0] = 0  # type: ignore[index]
    clip_adaptively(SGD(module.parameters()), 1e3)
    assert gradients(module)[0][0].tolist() == [0.0] * 4
    assert torch.equal(gradients(module)[0][1:], gradients(before)[0][1:])
    assert all(torch.equal(*pair) for pair in list(zip(gradients(module), gradients(before), strict=True))[1:5])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_norms_of_16_bit_tensors_are_of_float32(dtype: torch.dtype) -> None:
    weights = nn.Parameter(torch.full((2, 1000), 300.0, dtype=dtype))  # a norm in float16 would be infinite
    weights.grad = torch.full((2, 1000), 60.0, dtype=dtype)
    clip_adaptively(SGD([weights]), 0.01)
    torch.testing.assert_close(weights.grad, torch.full((2, 1000), 3.0, dtype=dtype), rtol=2**-8, atol=0)


def test_what_is_not_finite_is_not_hidden() -> None:
    module = Weights()
    module.all[0].grad[1, 0], module.all[1].grad[0] = torch.nan, torch.inf  # type: ignore[index]
    clip_adaptively(SGD(module.parameters()), 0.01)
    assert not gradients(module)[0][1].isfinite().any()
    assert not gradients(module)[1].isfinite().all()
    assert gradients(module)[0][0].isfinite().all()


def test_groups_may_be_left_out() -> None:
    module, before = Weights(), Weights()
    first, *others = module.parameters()
    clip_adaptively(SGD([{"params": [first], "agc": False}, {"params": others}]), 0.01)
    assert torch.equal(gradients(module)[0], gradients(before)[0])
    assert not torch.equal(gradients(module)[1], gradients(before)[1])


def test_sparse_gradients_are_refused() -> None:
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(lw.ConfigError, match="dense gradients"):
        clip_adaptively(SGD(table.parameters()), 0.01)


class Net(lw.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return nn.functional.mse_loss(self.layers(x), y) * 10

    def configure_optimizers(self) -> Any:
        return SGD(self.parameters(), lr=0.1, momentum=0.9)


def by_hand(accumulate: int, count: int = 8) -> Net:
    net, batches = Net(), list(loader(count))
    optimizer = net.configure_optimizers()
    for start in range(0, len(batches), accumulate):
        window = batches[start : start + accumulate]
        for number, batch in enumerate(window):
            (net.training_step(batch, number) / len(window)).backward()  # type: ignore[no-untyped-call]
        clip_adaptively_by_hand(net, 0.02)
        optimizer.step()
        optimizer.zero_grad()
    return net


def differences(net: nn.Module, expected: nn.Module) -> float:
    wanted = expected.state_dict()
    return max(float((value - wanted[name]).abs().max()) for name, value in net.state_dict().items())


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_trainer_clips_as_a_loop_does(accumulate: int) -> None:
    net = Net()
    quiet(max_epochs=1, accumulate_grad_batches=accumulate, gradient_clip_val=0.02, gradient_clip_algorithm="agc").fit(
        net, loader()
    )
    assert differences(net, by_hand(accumulate)) < 1e-6  # rounding of float32
    plain = Net()
    quiet(max_epochs=1, accumulate_grad_batches=accumulate).fit(plain, loader())
    assert differences(net, plain) > 1e-2


def test_a_loop_with_fabric_clips_as_the_trainer_does() -> None:
    net, fabric = Net(), lw.Fabric(accelerator="cpu", devices=1)
    model, optimizer = fabric.setup(net, net.configure_optimizers())
    model.mark_forward_method("training_step")
    for number, batch in enumerate(loader()):
        fabric.backward(model.training_step(batch, number))
        assert fabric.clip_gradients(model, optimizer, agc_factor=0.02) is None
        optimizer.step()
        optimizer.zero_grad()
    assert differences(net, by_hand(1)) < 1e-6
    with pytest.raises(lw.ConfigError, match=r"max_norm=1, agc_factor=0.1"):
        fabric.clip_gradients(model, optimizer, max_norm=1, agc_factor=0.1)
    with pytest.raises(lw.ConfigError, match="agc_factor='0.1'"):
        fabric.clip_gradients(model, optimizer, agc_factor="0.1")  # type: ignore[arg-type]


class Manual(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        optimizer = self.optimizers()
        loss = super().training_step(batch, batch_idx)
        optimizer.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(optimizer, 0.02, "agc")
        optimizer.step()
        return loss


def test_manual_optimization_clips() -> None:
    net = Manual()
    quiet(max_epochs=1).fit(net, loader())
    assert differences(net, by_hand(1)) < 1e-6


def test_an_unknown_algorithm_names_all() -> None:
    with pytest.raises(lw.ConfigError, match="'norm', 'value' or 'agc'"):
        lw.Trainer(gradient_clip_algorithm="acg")
