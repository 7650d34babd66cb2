"""Activation checkpointing of split layers: the numbers of one process, and a second forward pass of each block."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import tensor_models
import torch
from context_models import Positioned
from mesh_program import Program, fit, mesh, whole
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from loopwright.strategies.construction.activation_checkpointing import apply_activation_checkpointing
from loopwright.strategies.mesh.context import Context
from loopwright.strategies.mesh.tensor import resolve_plan
from loopwright.strategies.mesh.tensor.apply import apply

# Any in this file: options, and results that travel between processes.

EVERY = {"Block", "Attention", "MLP", "RMSNorm", "Linear", "Embedding"}
# Processes, the mesh, what is checkpointed, and how often an MLP is computed in a step.
CASES: dict[str, tuple[int, dict[str, Any], set[str], int]] = {
    "tp2": (2, {"tp": 2}, {"Block"}, 2),
    "every module": (2, {"tp": 2}, EVERY, 3),
    "sequence": (2, {"tp": 2, "sequence_parallel": True}, {"Block"}, 2),
    "fsdp2-tp2": (4, {"fsdp": 2, "tp": 2}, {"Block"}, 2),
    "pp2-tp2": (4, {"pp": 2, "tp": 2}, {"Block"}, 2),
    "cp2": (2, {"cp": 2, "context": Context(module="net")}, {"Block"}, 2),
    "cp2-ulysses": (2, {"cp": 2, "context": Context(module="net", method="ulysses")}, {"Block"}, 2),
}


def train(rank: int, size: int, axes: Mapping[str, Any], chosen: set[str]) -> Any:
    calls = 0
    forward = tensor_models.MLP.forward

    def counted(self: Any, x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return forward(self, x)

    tensor_models.MLP.forward = counted  # type: ignore[method-assign]
    strategy = mesh(**{"fsdp": 1, **axes}, activation_checkpointing=chosen, verify=False) if axes else "auto"
    program, data_size = Program(kind=Positioned), axes.get("fsdp", 1)
    _, module, rows = fit(strategy, size, module=program, data_size=data_size, limit_val_batches=0)
    return whole(module), rows.rows, calls


@pytest.mark.parametrize("name", CASES)
def test_blocks_that_read_parameters_of_their_own_train_as_on_one_process(name: str) -> None:
    size, axes, chosen, times = CASES[name]
    ((weights, rows, calls),) = run_ranks(train, 1, {}, set(), connect=False)
    everywhere = run_ranks(train, size, axes, chosen, connect=False)
    found: dict[str, Tensor] = {}
    for state, _, count in everywhere:
        found.update(state)
        assert count == times * calls // axes.get("pp", 1)
    assert found.keys() == weights.keys()
    assert max(float((found[one] - value).abs().max()) for one, value in weights.items()) <= 1e-12
    logged = next(one for _, one, _ in everywhere if one)
    assert len(logged) == len(rows)
    for (_, row), (_, wanted) in zip(logged, rows, strict=True):
        for key, value in wanted.items():
            assert row[key] == pytest.approx(value, rel=1e-13, abs=1e-13), key


class Conv1D(nn.Module):
    """A layer as transformers has it: the weight is transposed, and its forward reads the number of features."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf = nf
        self.weight, self.bias = nn.Parameter(torch.randn(nx, nf)), nn.Parameter(torch.randn(nf))

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:-1], self.nf)
        return torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), self.weight).view(shape)


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok = nn.Embedding(8, 6, padding_idx=5)
        self.up, self.down = Conv1D(12, 6), Conv1D(6, 12)

    def forward(self, indices: Tensor) -> Tensor:
        return self.down(self.up(self.tok(indices)).tanh())


def compute(rank: int, size: int) -> dict[str, float]:
    torch.manual_seed(0)
    ours, theirs = Words().double(), Words().double()
    theirs.load_state_dict(ours.state_dict())
    plan = resolve_plan(ours, {"tok": "embedding", "up": "colwise", "down": "rowwise"}, tp=size)
    apply(plan, list(ours.modules()), ours, init_device_mesh("cpu", (size,), mesh_dim_names=("tp",)))
    assert len(apply_activation_checkpointing(ours, {"Conv1D", "Embedding"})) == 3
    indices = torch.arange(8).repeat(2, 1)
    for one in (ours, theirs):
        one(indices).square().sum().backward()
    pairs = zip(ours.named_parameters(), theirs.parameters(), strict=True)
    return {name: float((own.grad.full_tensor() - other.grad).abs().max()) for (name, own), other in pairs}


def test_attributes_of_layers_are_those_of_a_rank_in_the_second_pass() -> None:
    for found in run_ranks(compute, 2):
        assert max(found.values()) <= 1e-11, found
