"""Norms and sums of sharded parameters, where hooks, optimizers and losses read them: those of one process."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ranks import run_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import loopwright as lw
from loopwright.loggers import DummyLogger
from loopwright.strategies import FSDPStrategy, MeshStrategy, Strategy
from loopwright.strategies.distributed.shards import full_tensor, is_sharded

# Any in this file: batches, and results that travel between processes.

WIDTH = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(WIDTH), nn.Module()
        self.mlp.up, self.mlp.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)
        self.mlp.forward = lambda x: self.mlp.down(torch.tanh(self.mlp.up(x)))  # type: ignore[operator, assignment]

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class Lamb(torch.optim.Optimizer):
    """Scales steps by norms that it reads as numbers."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for one in group["params"]:
                size, slope = one.norm().item(), float(one.grad.norm())
                one.add_(one.grad, alpha=-group["lr"] * (size / slope if size > 0 and slope > 0 else 1.0))


class Rows(DummyLogger):
    def __init__(self) -> None:
        super().__init__()
        self.rows: list[dict[str, float]] = []

    def log_metrics(self, metrics: Any, step: Any = None) -> None:
        self.rows.append(dict(metrics))


class Net(lw.Module):
    """A model whose loss has a penalty.

    Args:
        penalty: "none"; "full": of full tensors; "sharded": as one process would write it.
    """

    def __init__(self, penalty: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.penalty = penalty
        self.inp, self.out = nn.Linear(4, WIDTH).double(), nn.Linear(WIDTH, 1).double()
        self.blocks = nn.ModuleList([Block() for _ in range(2)]).double()
        self.norms: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        penalty: Any = 0.0
        if self.penalty != "none":
            penalty = 0.1 * sum(self.read(one).square().sum() for one in self.parameters())
        x = self.inp(batch[0])
        for block in self.blocks:
            x = block(x)
        loss = F.mse_loss(self.out(x), batch[1])
        self.log("loss", loss)
        return loss + penalty

    def read(self, one: Tensor) -> Tensor:
        return one.full_tensor() if self.penalty == "full" and is_sharded(one) else one

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        gradient = self.blocks[0].mlp.up.weight.grad
        self.log("norm", gradient.norm(), on_epoch=True, on_step=True)
        self.log("largest", gradient.abs().max(), reduce_fx="max")
        self.norms.append(gradient.norm().item())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return Lamb(self.parameters())


def fit(strategy: Strategy | str, size: int, parts: int, penalty: str) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(12, 3, width, generator=generator, dtype=torch.float64)[:, :2] for width in (4, 1))
    rows = Rows()
    trainer = lw.Trainer(
        accelerator="cpu", strategy=strategy, devices=size, precision="64-true", max_epochs=1, logger=rows,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, log_every_n_steps=1,
    )  # fmt: skip
    module = Net(penalty)
    trainer.fit(module, DataLoader(TensorDataset(x, y), batch_size=4 // parts))
    with torch.no_grad():
        state = {key: full_tensor(one) if is_sharded(one) else one for key, one in module.state_dict().items()}
    logged = [row[key] for row in rows.rows for key in ("norm_step", "norm_epoch", "largest") if key in row]
    return state, logged, module.norms


def strategies() -> dict[str, tuple[Strategy, int]]:
    plan = {"blocks.*.mlp.up": "colwise", "blocks.*.mlp.down": "rowwise"}
    return {
        "fsdp": (FSDPStrategy(auto_wrap_policy={"Block"}), 2),
        "tp": (MeshStrategy(fsdp=1, tp=2, tensor_plan=plan), 1),
        "sequence": (MeshStrategy(fsdp=1, tp=2, tensor_plan=plan, sequence_parallel=True), 1),
    }


def fit_everywhere(rank: int, size: int) -> list[str]:
    wrong = []
    for penalty in ("none", "full"):
        wanted, logged, norms = fit("single_device", 1, 1, penalty)
        for name in strategies():
            strategy, parts = strategies()[name]
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                found, found_logged, parts_of_norms = fit(strategy, size, parts, penalty)
            at = f"{name}, {penalty}"
            wrong += [f"{at}: {key}" for key, one in found.items() if (one - wanted[key]).abs().max() > 1e-12]
            if rank == 0 and found_logged != pytest.approx(logged, abs=1e-12):
                wrong.append(f"{at}: logged {found_logged} instead of {logged}")
            texts = [str(one.message) for one in caught if one.filename == __file__]
            if rank == 0 and not (len(texts) == len(norms) and all("full_tensor() before it" in one for one in texts)):
                wrong.append(f"{at}: warned {texts}")
            if all(one == pytest.approx(norm) for one, norm in zip(parts_of_norms, norms, strict=True)):
                wrong.append(f"{at}: the warning is not needed any more")
    return wrong


def test_optimizers_logs_and_penalties_have_the_numbers_of_one_process() -> None:
    assert run_ranks(fit_everywhere, 2, connect=False) == [[], []]


def refuse(rank: int, size: int) -> dict[str, str]:
    found = {}
    for name, (strategy, parts) in strategies().items():
        with pytest.raises(RuntimeError, match="mixed") as caught:
            fit(strategy, size, parts, "sharded")
        found[name] = "\n".join(caught.value.__notes__)
    return found


def test_a_penalty_of_sharded_parameters_is_an_error_that_names_them() -> None:
    for found in run_ranks(refuse, 2, connect=False):
        assert "depends on the DTensors blocks.0.norm.weight, blocks.0.norm.bias, blocks.0.mlp.up" in found["fsdp"]
        assert "depends on the DTensors blocks.0.mlp.up.weight, blocks.0.mlp.up.bias, blocks.0.mlp.down" in found["tp"]
        assert "depends on the DTensors" in found["sequence"]
        assert "parameter.full_tensor()" in found["tp"]


def log_with_fabric(rank: int, size: int) -> list[float]:
    """Log the norm of a sharded gradient, as it is and in full."""
    rows = Rows()
    fabric = lw.Fabric(accelerator="cpu", devices=size, strategy="fsdp", loggers=rows)
    fabric.launch()
    model = fabric.setup(nn.Linear(4, 4))
    fabric.backward(model(torch.ones(2, 4)).square().mean())
    norm: Any = next(model.parameters()).grad.norm()
    with pytest.raises(lw.ConfigError, match=r"whose parts differ by rank: \['norm'\](?s:.*)full_tensor"):
        fabric.log("norm", norm)
    fabric.log("norm", norm.full_tensor())
    return [row["norm"] for row in rows.rows]


def test_fabric_logs_no_part_of_a_norm() -> None:
    first, second = run_ranks(log_with_fabric, 2, connect=False)
    assert len(first) == 1
    assert second == []
