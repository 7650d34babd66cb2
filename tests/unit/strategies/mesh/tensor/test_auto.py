"""Plans from the graph of a module: found by one pass, confirmed by numbers, in one process."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tensor_models import CountingAttention, FusedAttention, Llama, llama
from torch import Tensor, nn

from loopwright.errors import ConfigError
from loopwright.strategies.mesh.tensor import Colwise, Rowwise, TensorPlan, resolve_plan
from loopwright.strategies.mesh.tensor.graph import LinearGroup
from loopwright.strategies.mesh.tensor.simulate import group_problem


def layers(plan: TensorPlan) -> dict[str, str]:
    return {name: {Colwise: "colwise", Rowwise: "rowwise"}[type(style)] for name, style in plan.styles.items()}


BLOCK = {
    "attn.wq": "colwise", "attn.wk": "colwise", "attn.wv": "colwise", "attn.wo": "rowwise",
    "mlp.w1": "colwise", "mlp.w3": "colwise", "mlp.w2": "rowwise",
}  # fmt: skip


def test_attention_and_mlp_of_every_block_are_found() -> None:
    plan = resolve_plan(llama(), tp=2)
    assert layers(plan) == {f"blocks.{block}.{name}": style for block in range(2) for name, style in BLOCK.items()}
    assert plan.source == "the graph"


def test_a_module_on_the_meta_device_has_the_same_plan() -> None:
    with torch.device("meta"):
        module = Llama()
    assert layers(resolve_plan(module, tp=4)) == layers(resolve_plan(llama(), tp=4))


def test_a_module_is_left_as_it_was() -> None:
    module = llama(attention=CountingAttention)
    before = {name: (id(one), one.clone()) for name, one in module.named_parameters()}
    state = torch.get_rng_state()
    plan = resolve_plan(module, tp=2)
    assert plan.counts["blocks.1.attn"] == {"num_heads": (4, 2)}
    assert module.blocks[0].attn.num_heads == 4
    assert all(id(one) == before[name][0] and one.equal(before[name][1]) for name, one in module.named_parameters())
    assert all(one.grad is None for one in module.parameters())
    assert torch.equal(state, torch.get_rng_state())
    assert not any(one._forward_hooks or one._forward_pre_hooks for one in module.modules())


def test_a_fused_layer_stays_whole_and_is_named() -> None:
    plan = resolve_plan(llama(attention=FusedAttention), tp=2)
    assert set(layers(plan)) == {f"blocks.{block}.mlp.{name}" for block in range(2) for name in ("w1", "w2", "w3")}
    assert len(plan.notes) == 1
    assert plan.notes[0].startswith("blocks.1.attn.wo stays whole, with qkv: it computes something else in parts")


def test_layers_of_a_sequential_are_paired() -> None:
    module = nn.Sequential(*[one for _ in range(5) for one in (nn.Linear(8, 8), nn.ReLU())])
    plan = resolve_plan(nn.ModuleDict({"net": module}), tp=2)
    assert layers(plan) == {"net.0": "colwise", "net.2": "rowwise", "net.4": "colwise", "net.6": "rowwise"}


class Between(nn.Module):
    """Two layers with something between them."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.up, self.norm, self.down = kind, nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        if self.kind == "norm":
            hidden = self.norm(hidden)
        if self.kind == "softmax":
            hidden = hidden.softmax(-1)
        if self.kind == "used twice":
            return self.down(F.gelu(hidden)) + hidden[..., :8]
        if self.kind == "flipped":
            hidden = hidden.flip(-1)
        return self.down(F.gelu(hidden))


@pytest.mark.parametrize("kind", ["norm", "softmax", "used twice", "flipped"])
def test_what_cannot_be_split_is_refused(kind: str) -> None:
    with pytest.raises(ConfigError, match="tensor_plan='auto' found no layers of ModuleDict to split over tp=2"):
        resolve_plan(nn.ModuleDict({"one": Between(kind)}), tp=2)


@pytest.mark.parametrize("kind", ["norm", "softmax", "used twice", "flipped"])
def test_numbers_refuse_what_the_graph_might_let_pass(kind: str) -> None:
    problem = group_problem(Between(kind), LinearGroup(("up",), "down"), 2)
    assert problem is not None
    assert group_problem(Between("nothing"), LinearGroup(("up",), "down"), 2) is None


def test_numbers_of_features_that_do_not_divide_are_named() -> None:
    with pytest.raises(ConfigError, match="up has 16 features, which tp=3 does not divide"):
        resolve_plan(nn.ModuleDict({"one": Between("nothing")}), tp=3)
