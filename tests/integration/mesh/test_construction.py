"""Modules that are built without memory: on any mesh they begin, and train, with the values of one process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from mesh_program import Program, fit, mesh, whole
from ranks import run_ranks
from tensor_models import Llama
from torch import Tensor, nn

import loopwright as lw
from loopwright.strategies import MeshStrategy
from loopwright.strategies.construction.operator_replay import is_deferred

# Any in this file: options, and results that travel between processes.

MESHES: dict[str, tuple[int, dict[str, int]]] = {
    "tp2": (2, {"tp": 2}),
    "pp2": (2, {"pp": 2}),
    "pp2-fsdp2-tp2": (8, {"pp": 2, "fsdp": 2, "tp": 2}),
}


class Deferred(Program):
    """Builds its model in configure_model, with tied weights, values that depend on each other, and a cast.

    Attributes:
        first: The full weights at the beginning of training.
        had_memory: Whether parameters had memory after construction.
    """

    def __init__(self) -> None:
        super().__init__()
        del self.net
        self.first: dict[str, Tensor] = {}
        self.had_memory = False

    def configure_model(self) -> None:
        if hasattr(self, "net"):
            return
        net = Llama(tied=True, blocks=4)
        for block in net.blocks:
            nn.init.trunc_normal_(block.attn.wq.weight, std=0.02)  # type: ignore[union-attr,arg-type]
            with torch.no_grad():
                block.gain.mul_(torch.rand(()))  # type: ignore[operator,union-attr]
        with torch.no_grad():
            net.norm.weight.copy_(net.tok.weight[0])
        self.net = net.double()
        self.had_memory = not all(is_deferred(one) for one in self.net.blocks.parameters())

    def on_train_start(self) -> None:
        self.first = whole(self)


def train(rank: int, size: int, axes: Mapping[str, int]) -> Any:
    torch.manual_seed(11)
    strategy = mesh(**{"fsdp": 1, **axes}) if axes else "auto"
    _, module, _ = fit(strategy, size, module=Deferred(), data_size=axes.get("fsdp", 1), steps=3, limit_val_batches=0)
    assert isinstance(module, Deferred)
    return module.first, whole(module), module.had_memory, module.net.head.weight is module.net.tok.weight


@pytest.mark.parametrize("name", MESHES)
def test_a_model_of_configure_model_begins_with_the_bits_of_one_process(name: str) -> None:
    size, axes = MESHES[name]
    ((first, trained, had_memory, _),) = run_ranks(train, 1, {}, connect=False)
    assert had_memory
    everywhere = run_ranks(train, size, axes, connect=False)
    names: set[str] = set()
    for begun, ended, has_memory, is_tied in everywhere:
        assert not has_memory
        assert is_tied == ("pp" not in axes)
        names |= begun.keys()
        for key, value in begun.items():
            assert torch.equal(value, first[key]), key
        for key, value in ended.items():
            assert (value - trained[key]).abs().max() <= 1e-12, key
    assert names == first.keys()


class OnMeta(lw.Module):
    """Builds layers of torch on the meta device; `reset_parameters` of each fills it."""

    def __init__(self) -> None:
        super().__init__()
        self.first: dict[str, Tensor] = {}

    def configure_model(self) -> None:
        if hasattr(self, "blocks"):
            return
        with torch.device("meta"):
            self.tok = nn.Embedding(8, 6)
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 6)) for _ in range(4))
            self.norm = nn.LayerNorm(6)

    def tensor_plan(self) -> dict[str, str]:
        return {"tok": "embedding", "blocks.*.0": "colwise", "blocks.*.2": "rowwise"}

    def on_train_start(self) -> None:
        self.first = whole(self)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.tok(batch)
        for block in self.blocks:
            x = block(x)
        return self.norm(x).cos().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def begin(rank: int, size: int, axes: Mapping[str, int]) -> dict[str, Tensor]:
    lw.seed_everything(3, verbose=False)
    module = OnMeta()
    trainer = lw.Trainer(
        accelerator="cpu", strategy=MeshStrategy(**{"fsdp": 1, **axes}), devices=size, max_steps=1,
        accumulate_grad_batches=2, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, [torch.arange(8).view(2, 4)] * 4)
    return module.first


def test_a_model_from_the_meta_device_begins_with_the_same_values_on_any_mesh() -> None:
    (wanted,) = run_ranks(begin, 1, {}, connect=False)
    assert all(bool(value.isfinite().all()) for value in wanted.values())
    assert wanted["blocks.3.2.weight"].std() > 0.1
    for size, axes in MESHES.values():
        found: dict[str, Tensor] = {}
        for one in run_ranks(begin, size, axes, connect=False):
            for key, value in one.items():
                assert torch.equal(found.setdefault(key, value), value), key
        assert found.keys() == wanted.keys()
        for key, value in wanted.items():
            assert torch.equal(found[key], value), (axes, key)
