"""Gradients of gradients on several ranks: penalties, forces and products with the Hessian are those of one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.utils.data import DataLoader, TensorDataset

import loopwright as lw
from loopwright.errors import ModuleError
from loopwright.strategies import FSDPStrategy, MeshStrategy, ModelParallelStrategy, Strategy

# Any in this file: batches, and results that travel between processes.

WIDTH, STEPS = 8, 3


class MLP(nn.Module):
    """Computes gate and values by two layers, or by one."""

    def __init__(self, *, is_packed: bool) -> None:
        super().__init__()
        sizes = [2 * 16] if is_packed else [16, 16]
        self.ups = nn.ModuleList([nn.Linear(WIDTH, size) for size in sizes])
        self.down = nn.Linear(16, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        parts = [part for up in self.ups for part in up(x).chunk(3 - len(self.ups), -1)]
        return self.down(torch.tanh(parts[0]) * torch.sigmoid(parts[1]))


class Block(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(WIDTH), MLP(**options)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.moe = lw.Experts(dim=WIDTH, hidden=8, num_experts=4, top_k=2, activation=torch.tanh)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.moe(self.norm(x))


class Net(nn.Module):
    def __init__(self, *, is_mixture: bool = False, is_packed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inp = nn.Linear(4, WIDTH)
        self.blocks = nn.ModuleList([Mixture() if is_mixture else Block(is_packed=is_packed) for _ in range(2)])
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return torch.tanh(self.head(x))


def penalized(net: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> Tensor:
    """Return a loss with second and third derivatives of the model."""
    x = x.clone().requires_grad_()
    output = net(x)
    (gradient,) = torch.autograd.grad(output.square().sum(), x, create_graph=True)
    (product,) = torch.autograd.grad((gradient * y).sum(), x, create_graph=True)
    again = net(x.detach() * 0.5)  # between the recorded passes and the one that differentiates them
    return F.mse_loss(output, y) + (gradient.norm(dim=-1) - 1).square().mean() + product.square().mean() + again.mean()


def whole(output: Tensor) -> Tensor:
    return output.full_tensor() if isinstance(output, DTensor) else output


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return tuple(torch.randn(4, 6, 4, generator=generator, dtype=torch.float64) for _ in range(2))  # type: ignore[return-value]


def train(
    fabric: lw.Fabric | None, net: nn.Module, parts: int, part: int, *, is_raw: bool = False
) -> dict[str, Tensor]:
    """Train with this part of each batch, by Fabric or without; return the full weights."""
    model: Any = net.double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    if fabric is not None:
        model, optimizer = fabric.setup(model, optimizer)
    for step in range(STEPS):
        x, y = (one.chunk(parts)[part] for one in batch(step))
        loss = penalized(lambda x: whole(model(x)), x, y)
        loss.backward() if fabric is None or is_raw else fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        return {name: whole(one).detach() for name, one in net.named_parameters()}


PLAN = {"blocks.*.mlp.ups.*": "colwise", "blocks.*.mlp.down": "rowwise"}
OF_TORCH = {"blocks.*.mlp.ups.*": ColwiseParallel(), "blocks.*.mlp.down": RowwiseParallel()}


def strategies() -> dict[str, tuple[Strategy, dict[str, bool]]]:
    units = {"Block", "Mixture"}
    packed = {**PLAN, "blocks.*.mlp.ups.*": "packed_colwise"}
    gathered = {**PLAN, "head": "colwise_gather_output", "inp": "colwise_gather_output"}
    return {
        "fsdp": (FSDPStrategy(auto_wrap_policy=units), {}),
        "fsdp, kept": (FSDPStrategy(auto_wrap_policy=units, sharding_strategy="SHARD_GRAD_OP"), {}),
        "ep": (MeshStrategy(fsdp=2, ep=2, auto_wrap_policy=units), {"is_mixture": True}),
        "tp": (MeshStrategy(fsdp=1, tp=2, tensor_plan=gathered), {}),
        "packed": (MeshStrategy(fsdp=1, tp=2, tensor_plan=packed), {"is_packed": True}),
        "sequence": (MeshStrategy(fsdp=1, tp=2, tensor_plan=PLAN, sequence_parallel=True), {}),
    }


def train_everywhere(rank: int, size: int) -> dict[str, float]:
    found = {}
    for name, (strategy, options) in strategies().items():
        fabric = lw.Fabric(accelerator="cpu", devices=size, strategy=strategy, precision="64-true")
        fabric.launch()
        topology = fabric.strategy.topology
        weights = train(fabric, Net(**options), topology.data_size, topology.data_rank)
        wanted = train(None, Net(**options), 1, 0)
        assert list(weights) == list(wanted)
        found[name] = max(float((weights[key] - value).abs().max()) for key, value in wanted.items())
    return found


def test_second_and_third_derivatives_are_those_of_one_process() -> None:
    for found in run_ranks(train_everywhere, 2, connect=False):
        assert max(found.values()) <= 1e-12, found  # sums in another order


class Adversary(lw.Module):
    """Two networks and two optimizers; the second network's gradient is penalized."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.made, self.judge = Net().double(), Net().double()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        first, second = self.optimizers()
        made = self.made(x)
        loss = self.judge(made.detach()).mean() - self.judge(y).mean() + penalized(self.judge, made.detach(), y)
        self.manual_backward(loss)
        second.step()
        second.zero_grad()
        self.manual_backward(-self.judge(made).mean())
        first.step()
        first.zero_grad()
        second.zero_grad()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(one.parameters(), lr=1e-2) for one in (self.made, self.judge)]


class Penalized(lw.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net().double()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return penalized(self.net, *batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-2)


def fit(module: lw.Module, strategy: Strategy | str, size: int, parts: int, **options: Any) -> dict[str, Tensor]:
    trainer = lw.Trainer(**{
        "accelerator": "cpu", "strategy": strategy, "devices": size, "precision": "64-true", "max_epochs": 1,
        "logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False,
        **options,
    })  # fmt: skip
    x, y = (torch.cat(ones) for ones in zip(*map(batch, range(STEPS + 1)), strict=True))
    trainer.fit(module, DataLoader(TensorDataset(x, y), batch_size=4 // parts))
    with torch.no_grad():
        return {name: whole(one).detach() for name, one in module.named_parameters()}


def fit_both(rank: int, size: int) -> dict[str, float]:
    found = {}
    for kind, options in ((Adversary, {}), (Penalized, {"accumulate_grad_batches": 2})):
        strategy = FSDPStrategy(auto_wrap_policy={"Block"})
        weights = fit(kind(), strategy, size, size, **options)
        wanted: Any = torch.load("alone.pt")[kind.__name__]
        found[kind.__name__] = max(float((weights[key] - value).abs().max()) for key, value in wanted.items())
    return found


def fit_alone(rank: int, size: int) -> None:
    torch.save(
        {
            "Adversary": fit(Adversary(), "single_device", 1, 1),
            "Penalized": fit(Penalized(), "single_device", 1, 1, accumulate_grad_batches=2),
        },
        "alone.pt",
    )


def test_penalties_in_a_trainer_with_units_are_those_of_one_process(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run_ranks(fit_alone, 1, connect=False)
    for found in run_ranks(fit_both, 2, connect=False):
        assert max(found.values()) <= 1e-12, found


def refuse(rank: int, size: int) -> dict[str, str]:
    """Return the errors of strategies that do not compute second derivatives, before any weight has changed."""

    def parallelize(net: Any, mesh: Any) -> Any:
        from torch.distributed.tensor.parallel import parallelize_module

        plans = {"mlp.ups.0": ColwiseParallel(), "mlp.ups.1": ColwiseParallel(), "mlp.down": RowwiseParallel()}
        for block in net.blocks:
            parallelize_module(block, mesh["tensor_parallel"], plans)
        return net

    found = {}
    in_parts = {**PLAN, "head": "colwise_gather_output"}
    for name, strategy in {
        "styles of torch": MeshStrategy(fsdp=1, tp=2, tensor_plan=OF_TORCH),
        "logits": MeshStrategy(fsdp=1, tp=2, tensor_plan=in_parts, loss_parallel=True),
        "own": ModelParallelStrategy(1, 2, parallelize_fn=parallelize),
    }.items():
        net = Net().double()
        before = {key: value.clone() for key, value in net.state_dict().items()}
        fabric = lw.Fabric(accelerator="cpu", devices=size, strategy=strategy, precision="64-true")
        fabric.launch()
        with pytest.raises(ModuleError) as caught:
            train(fabric, net, 1, 0)
        found[name] = str(caught.value)
        after = {key: whole(value).detach() for key, value in net.state_dict().items()}
        assert all(torch.equal(before[key], value) for key, value in after.items()), name
    return found


def step_without_fabric(rank: int, size: int) -> str:
    strategy = FSDPStrategy(auto_wrap_policy={"Block"})
    fabric = lw.Fabric(accelerator="cpu", devices=size, strategy=strategy, precision="64-true")
    fabric.launch()
    with pytest.raises(ModuleError) as caught:
        train(fabric, Net(), size, rank, is_raw=True)
    return str(caught.value)


def test_a_backward_pass_that_the_strategy_does_not_see_is_refused() -> None:
    for text in run_ranks(step_without_fabric, 2, connect=False):
        assert "got loss.backward(): they are not reduced" in text


def test_what_does_not_compute_second_derivatives_says_so() -> None:
    for found in run_ranks(refuse, 2, connect=False):
        assert list(found) == ["styles of torch", "logits", "own"]
        assert all("DTensors over tp, got a second one" in one for one in found.values())


class OfParameters(Penalized):
    """Penalizes gradients of its parameters, of which units compute with gathered copies."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.net(batch[0]).square().mean()
        parameters = list(self.net.blocks.parameters())
        found = torch.autograd.grad(loss, parameters, create_graph=True, allow_unused=True)
        return loss + sum(one.square().sum() for one in found if one is not None)


class Transformed(Penalized):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return torch.func.vmap(torch.func.grad(lambda x: self.net(x).sum()))(batch[0]).square().mean()


def fail(rank: int, size: int) -> list[str]:
    """Return what errors of gradients within a step say, with their notes."""
    found = []
    for module, strategy in (
        (OfParameters(), FSDPStrategy(auto_wrap_policy={"Block"})),
        (Transformed(), MeshStrategy(fsdp=1, tp=2, tensor_plan={f"net.{name}": style for name, style in PLAN.items()})),
    ):
        with pytest.raises((ModuleError, RuntimeError)) as caught:
            fit(module, strategy, size, size)
        found.append("\n".join([str(caught.value), *getattr(caught.value, "__notes__", ())]))
    return found


def test_gradients_in_a_step_that_would_be_lost_are_refused() -> None:
    for of_parameters, transformed in run_ranks(fail, 2, connect=False):
        assert "Expected a step without gradients of sharded parameters" in of_parameters
        assert "split over tp do not run in transforms of torch.func: take torch.autograd.grad" in transformed
