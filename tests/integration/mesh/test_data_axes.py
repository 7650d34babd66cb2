"""MeshStrategy on the axes dp and fsdp: the results of FSDPStrategy, and what modules see of the mesh."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from mesh_program import part_of
from ranks import run_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import loopwright as lw
from loopwright.strategies import FSDPStrategy, MeshStrategy, Strategy, TorchSyncBatchNorm

# Any in this file: results that travel between processes.


class Net(lw.Module):
    """Two layers with dropout, and a parameter that cannot be sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []
        self.first = nn.Linear(4, 6)
        self.last = nn.Linear(6, 3)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        self.seen.append(x[:, 0].tolist())
        hidden = nn.functional.dropout(self.first(x).tanh(), 0.5)
        return nn.functional.mse_loss(self.last(hidden) * self.scale, y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.05)


def fit(size: int, strategy: Strategy | str) -> tuple[lw.Trainer, Net]:
    generator = torch.Generator().manual_seed(2)
    x, y = (torch.randn(32, width, generator=generator, dtype=torch.float64) for width in (4, 3))
    lw.seed_everything(1, verbose=False)
    module = Net()
    trainer = lw.Trainer(
        accelerator="cpu", strategy=strategy, devices=size, precision="64-true", max_epochs=1, logger=False,
        accumulate_grad_batches=2, gradient_clip_val=0.1, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(TensorDataset(x, y), batch_size=2, shuffle=True))
    return trainer, module


def whole(module: nn.Module) -> dict[str, Tensor]:
    with torch.no_grad():
        state = part_of(module)
        return {n: (v.full_tensor() if hasattr(v, "full_tensor") else v).clone() for n, v in state.items()}


def train(rank: int, size: int, strategy: Strategy | str) -> Any:
    trainer, module = fit(size, strategy)
    return whole(module), module.seen, trainer.strategy.topology.data_rank


@pytest.mark.parametrize(
    ("mesh", "fsdp"),
    [
        (MeshStrategy(auto_wrap_policy={nn.Linear}), FSDPStrategy(auto_wrap_policy={nn.Linear})),
        (
            MeshStrategy(dp=2, auto_wrap_policy={nn.Linear}),
            FSDPStrategy(
                sharding_strategy="HYBRID_SHARD", device_mesh=(2, 2), auto_wrap_policy={nn.Linear}
            ),
        ),
        (MeshStrategy(dp=-1), FSDPStrategy(sharding_strategy="NO_SHARD")),
    ],
    ids=["fsdp", "dp x fsdp", "dp"],
)  # fmt: skip
def test_the_weights_are_those_of_fsdp(mesh: Strategy, fsdp: Strategy) -> None:
    for (ours, seen, data_rank), (theirs, seen_there, rank) in zip(
        run_ranks(train, 4, mesh, connect=False), run_ranks(train, 4, fsdp, connect=False), strict=True
    ):
        for name, value in theirs.items():
            # Additions within a kernel may come in another order, as tensors lie in memory.
            torch.testing.assert_close(ours[name], value, rtol=1e-13, atol=1e-15)
        assert (seen, data_rank) == (seen_there, rank)


def look(rank: int, size: int) -> Any:
    trainer, module = fit(size, "mesh:dp=2,fsdp=2")
    mesh = module.device_mesh
    assert mesh is not None
    assert mesh is trainer.strategy.device_mesh
    return mesh.mesh_dim_names, tuple(mesh.shape), mesh["dp"].get_local_rank(), mesh["fsdp"].get_local_rank()


def test_a_module_sees_the_mesh() -> None:
    names = ("pp", "dp", "fsdp", "cp", "tp")
    everywhere = run_ranks(look, 4, connect=False)
    assert everywhere == [(names, (1, 2, 2, 1, 1), dp, fsdp) for dp in range(2) for fsdp in range(2)]


def group_of_norms(rank: int, size: int) -> Any:
    strategy = MeshStrategy(fsdp=2, tp=2)
    lw.Fabric(accelerator="cpu", strategy=strategy, devices=size).launch()
    norm: Any = TorchSyncBatchNorm(strategy.batch_norm_group).apply(nn.BatchNorm1d(4))
    return torch.distributed.get_process_group_ranks(norm.process_group)


def test_synchronized_batch_norms_count_each_batch_once() -> None:
    assert run_ranks(group_of_norms, 4, connect=False) == [[0, 2], [1, 3], [0, 2], [1, 3]]


def alone(rank: int, size: int) -> Any:
    trainer, module = fit(1, MeshStrategy(start_method="popen"))
    return whole(module), type(trainer.strategy).__name__


def test_one_process_has_a_mesh_of_one() -> None:
    (state, name) = run_ranks(alone, 1, connect=False)[0]
    _, module = fit(1, "auto")
    assert name == "MeshStrategy"
    for key, value in whole(module).items():
        torch.testing.assert_close(state[key], value, rtol=1e-13, atol=1e-15)
