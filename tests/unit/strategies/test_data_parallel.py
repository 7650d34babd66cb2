from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import loopwright as lw
from loopwright.errors import ConfigError, ModuleError
from loopwright.strategies import STRATEGY_REGISTRY, DataParallelStrategy

CPU = torch.device("cpu")


class Net(nn.Module):
    def __init__(self, form: str = "mean") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 1, dtype=torch.float64)
        self.form = form
        self.sizes: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, weight = batch["x"], batch["weight"]
        self.sizes.append(len(x))
        losses = self(x).square().squeeze(1)
        if self.form == "mean":
            return losses.mean()
        if self.form == "dict":
            return {"loss": losses.mean(), "losses": losses.detach(), "worst": losses.detach().max(), "name": "x"}
        if self.form == "Loss":
            return lw.Loss((losses * weight).sum(), weight.sum())
        if self.form == "dict of Loss":
            return {"loss": lw.Loss((losses * weight).sum(), float(len(x)))}
        if self.form == "sum and weight":
            return {"loss_sum": (losses * weight).sum(), "weight": len(x)}
        if self.form == "skips":
            return None if x[0, 0] > 0 else losses.mean()
        return losses.mean() if len(x) == 3 else {"loss": losses.mean()}

    def validation_step(self, batch: Any) -> int:
        return len(batch["x"])


def batch(size: int = 7) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(size, 3, generator=generator, dtype=torch.float64)
    return {"x": x, "weight": torch.arange(size, dtype=torch.float64), "names": ["a", "b"], "scale": torch.tensor(2.0)}


def run(form: str, devices: int, data: Any = None) -> tuple[Any, Net]:
    module = Net(form)
    strategy = DataParallelStrategy(parallel_devices=[CPU] * devices)
    model = strategy.setup_module(module)
    assert model is module
    return strategy.bind_step(model, "training_step")(data or batch(), 0), module


def loss_of(output: Any) -> Tensor:
    if isinstance(output, dict) and "loss_sum" in output:
        return output["loss_sum"] / output["weight"]
    loss = output["loss"] if isinstance(output, dict) else output
    return loss.mean() if isinstance(loss, lw.Loss) else loss


@pytest.mark.parametrize("form", ["mean", "dict", "Loss", "dict of Loss", "sum and weight"])
def test_the_gradient_is_that_of_the_full_batch(form: str) -> None:
    whole, expected = run(form, 1)
    assert expected.sizes == [7]
    cut, module = run(form, 3)
    assert module.sizes == [3, 3, 1]
    assert type(cut) is type(whole)
    for output, one in ((whole, expected), (cut, module)):
        loss_of(output).backward()
        assert one.layer.weight.grad is not None
    torch.testing.assert_close(loss_of(cut), loss_of(whole), rtol=1e-14, atol=0)
    torch.testing.assert_close(module.layer.weight.grad, expected.layer.weight.grad, rtol=1e-14, atol=1e-16)


def test_extras_are_joined_along_the_batch_and_scalars_averaged() -> None:
    whole, _ = run("dict", 1)
    cut, _ = run("dict", 3)
    assert torch.equal(cut["losses"], whole["losses"])
    assert cut["name"] == "x"
    assert cut["worst"].shape == ()


def test_parts_that_are_skipped_do_not_count() -> None:
    data = batch(4)
    data["x"][:, 0] = torch.tensor([1.0, 1.0, -1.0, -1.0])
    cut, module = run("skips", 2, data)
    assert torch.equal(cut, module.layer(data["x"][2:]).square().mean())
    data["x"][:, 0] = 1.0
    assert run("skips", 2, data)[0] is None


def test_parts_of_different_forms_are_refused() -> None:
    with pytest.raises(ModuleError, match="Tensor and dict"):
        run("mixed", 3)


def test_forward_joins_tensors_and_stacks_scalars_which_all_reduce_averages() -> None:
    strategy = DataParallelStrategy(parallel_devices=[CPU] * 2)

    class Both(Net):
        def forward(self, x: Tensor) -> Any:
            y = self.layer(x)
            return y, {"mean": y.mean(), "kind": "y"}

    module = Both()
    x = batch(6)["x"]
    y, extra = strategy.bind_step(module, "forward")(x)
    assert torch.equal(y, module.layer(x))
    assert extra["kind"] == "y"
    assert extra["mean"].shape == (2,)
    torch.testing.assert_close(strategy.all_reduce(extra)["mean"], y.mean())
    assert strategy.reduce(torch.tensor([1, 2]), reduce_op="mean").item() == 1.5
    assert strategy.all_reduce(torch.tensor([1, 5, 2]), "max").item() == 5
    assert strategy.all_reduce(torch.tensor([1, 5, 2]), reduce_op="sum").item() == 8
    with pytest.raises(ConfigError, match="did you mean 'mean'"):
        strategy.all_reduce(torch.ones(2), reduce_op="meen")


def test_evaluation_is_not_split_and_there_is_one_process() -> None:
    strategy = DataParallelStrategy(parallel_devices=[CPU] * 2)
    module = Net()
    assert strategy.bind_step(module, "validation_step")(batch()) == 7
    assert strategy.world_size == 1
    assert strategy.distributed_sampler_kwargs is None
    assert strategy.device == CPU
    assert strategy.gather_objects(1) == [1]
    assert strategy.broadcast("x") == "x"


def test_a_batch_that_cannot_be_split_runs_on_one_device() -> None:
    one = batch(1)
    assert run("mean", 2, one)[1].sizes == [1]
    uneven = {**batch(4), "weight": torch.ones(3)}
    assert run("mean", 2, uneven)[1].sizes == [4]


def test_the_name_makes_it() -> None:
    assert isinstance(STRATEGY_REGISTRY.create("dp"), DataParallelStrategy)
