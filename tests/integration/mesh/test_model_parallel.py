"""ModelParallelStrategy: programs that parallelize themselves, as Lightning's documentation has them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset

import loopwright as lw
from loopwright.errors import ConfigError
from loopwright.strategies import ModelParallelStrategy

# Any in this file: batches, and results that travel between processes.


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = (nn.Linear(*sizes, bias=False) for sizes in ((8, 16), (16, 8), (8, 16)))

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


PLAN = {"w1": ColwiseParallel(), "w2": RowwiseParallel(), "w3": ColwiseParallel()}


class Program(lw.Module):
    """Builds its model in configure_model and parallelizes it there; in one process there is no mesh."""

    def __init__(self, *, is_meta: bool = False) -> None:
        super().__init__()
        self.model: Any = None
        self.is_meta = is_meta

    def configure_model(self) -> None:
        if self.model is not None:
            return
        torch.manual_seed(5)
        if self.device_mesh is None:
            self.model = nn.Sequential(FeedForward(), FeedForward())
            return
        with torch.device("meta" if self.is_meta else "cpu"):
            self.model = nn.Sequential(FeedForward(), FeedForward())
        tp_mesh, dp_mesh = self.device_mesh["tensor_parallel"], self.device_mesh["data_parallel"]
        for layer in self.model:
            if tp_mesh.size() > 1:
                parallelize_module(layer, tp_mesh, PLAN)
            if dp_mesh.size() > 1:
                fully_shard(layer, mesh=dp_mesh)
        if dp_mesh.size() > 1:
            fully_shard(self.model, mesh=dp_mesh)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.mse_loss(self.model(x), y)
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def fit(strategy: Any, size: int, data_size: int, *, is_meta: bool = False) -> Any:
    generator = torch.Generator().manual_seed(2)
    x, y = (torch.randn(24, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    module = Program(is_meta=is_meta)
    trainer = lw.Trainer(
        accelerator="cpu", strategy=strategy, devices=size, precision="64-true", max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, gradient_clip_val=0.1,
    )  # fmt: skip
    trainer.fit(module, DataLoader(TensorDataset(x, y), batch_size=4 // data_size))
    return trainer, module


def whole(module: nn.Module) -> dict[str, Tensor]:
    with torch.no_grad():
        state = module.state_dict()
        return {n: (v.full_tensor() if hasattr(v, "full_tensor") else v).clone() for n, v in state.items()}


def train(rank: int, size: int, data: int, tensor: int) -> Any:
    strategy = ModelParallelStrategy(data_parallel_size=data, tensor_parallel_size=tensor)
    trainer, module = fit(strategy, size, data)
    mesh = module.device_mesh
    return whole(module), mesh.mesh_dim_names, tuple(mesh.shape), float(trainer.callback_metrics["train_loss"])


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")  # torch warns of what its own RowwiseParallel returns
@pytest.mark.parametrize(("data", "tensor"), [(1, 2), (2, 1), (2, 2)])
def test_a_program_that_parallelizes_itself_trains_as_one_process(data: int, tensor: int) -> None:
    trainer, alone = fit("auto", 1, 1)
    for weights, names, shape, loss in run_ranks(train, data * tensor, data, tensor, connect=False):
        assert (names, shape) == (("data_parallel", "tensor_parallel"), (data, tensor))
        assert loss == pytest.approx(float(trainer.callback_metrics["train_loss"]), rel=1e-13)
        for name, value in whole(alone).items():
            torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-12)


def fill(rank: int, size: int, data: int) -> Any:
    _, module = fit(ModelParallelStrategy(data, "auto"), size, data, is_meta=True)
    return whole(module)


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
def test_a_model_from_the_meta_device_has_the_same_values_on_any_mesh() -> None:
    first, *others = [weights for data in (2, 4) for weights in run_ranks(fill, 4, data, connect=False)]
    for weights in others:
        for name, value in first.items():
            assert value.abs().max() > 0
            torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-12)


def by_fabric(rank: int, size: int) -> Any:
    def parallelize(module: nn.Module, mesh: Any) -> nn.Module:
        return parallelize_module(module, mesh["tensor_parallel"], PLAN)

    strategy = ModelParallelStrategy(parallelize_fn=parallelize, data_parallel_size=1, tensor_parallel_size=size)
    fabric = lw.Fabric(accelerator="cpu", devices=size, strategy=strategy, precision="64-true")
    fabric.launch()
    torch.manual_seed(5)
    model = fabric.setup_module(FeedForward())
    output = model(torch.ones(1, 8, dtype=torch.float64)) + 0  # waits for the sum over ranks
    return output.detach(), str(model.w1.weight.placements)


def test_fabric_calls_the_function() -> None:
    torch.manual_seed(5)
    wanted = FeedForward().double()(torch.ones(1, 8, dtype=torch.float64)).detach()
    for output, placements in run_ranks(by_fabric, 2, connect=False):
        torch.testing.assert_close(output, wanted, rtol=1e-13, atol=1e-15)
        assert "Shard(dim=0)" in placements


def test_sizes_follow_from_nodes_and_processes() -> None:
    strategy = ModelParallelStrategy()
    strategy.check_processes(8, 2)
    assert (strategy.axes.fsdp, strategy.axes.tp) == (2, 4)
    with pytest.raises(ConfigError, match=r"Expected 6 processes for the mesh fsdp=2, tp=3 \(2 x 3\), got 4"):
        lw.Trainer(strategy=ModelParallelStrategy(2, 3), devices=4, accelerator="cpu")
    with pytest.raises(ConfigError, match="Expected a positive number or 'auto' for data_parallel_size, got <function"):
        ModelParallelStrategy(fit)  # type: ignore[arg-type]
