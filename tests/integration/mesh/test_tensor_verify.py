"""The comparison of a split module with the full one, and faults that it must find."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ranks import run_ranks
from tensor_models import PLAN, CountingAttention, FusedAttention, SideBySide, llama, loss_of, tokens
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from loopwright.errors import ModuleError
from loopwright.strategies.mesh.tensor import PackedColwise, Rowwise, resolve_plan
from loopwright.strategies.mesh.tensor.apply import apply, finish
from loopwright.strategies.mesh.tensor.verify import recording, verify_plan

# Any in this file: options that travel between processes.


def check(module: nn.Module, wanted: Any, size: int, batch: Tensor, **options: Any) -> str:
    """Run a batch through a split module, compare, and return what was wrong."""
    plan = resolve_plan(module, wanted, tp=size, **options)
    apply(plan, list(module.modules()), module, init_device_mesh("cpu", (size,), mesh_dim_names=("tp",)))
    finish(plan, module)
    with recording(plan, module) as calls:
        module(batch)
    assert set(calls) == set(plan.groups)
    before = torch.get_rng_state()
    try:
        verify_plan(plan, module, calls)
    except ModuleError as error:
        return error.what
    finally:
        assert torch.equal(before, torch.get_rng_state())
        assert all(one.grad is None and one.requires_grad for one in module.parameters())
        assert module.training
    return ""


def of_llama(rank: int, size: int, wanted: Any, options: dict[str, Any], dtype: torch.dtype) -> str:
    return check(llama(**options).to(dtype), wanted, size, tokens(0)[0])


FUSED = {name: one for name, one in PLAN.items() if name != "blocks.*.attn.w[qkv]"}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_right_plan_passes(dtype: torch.dtype) -> None:
    assert run_ranks(of_llama, 2, PLAN, {"attention": CountingAttention}, dtype) == ["", ""]


def test_a_fused_layer_with_declared_parts_passes() -> None:
    wanted = {**FUSED, "blocks.*.attn.qkv": PackedColwise(parts=3)}
    assert run_ranks(of_llama, 2, wanted, {"attention": FusedAttention, "tied": True}, torch.float32) == ["", ""]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_fused_layer_declared_colwise_is_named(dtype: torch.dtype) -> None:
    wanted = {**FUSED, "blocks.*.attn.qkv": "colwise"}
    for what in run_ranks(of_llama, 2, wanted, {"attention": FusedAttention}, dtype):
        assert "Expected blocks.0.attn to compute on 2 ranks what it computes on one, got a difference in " in what
        assert "blocks.0.attn.wo: rowwise, blocks.0.attn.qkv: colwise" in what


def test_weights_of_this_ranks_heads_are_named_where_something_reads_them() -> None:
    wanted = {"blocks.*.[qkv]": "colwise", "blocks.*.o": "rowwise"}
    options = {"kind": SideBySide, "is_eager": True}
    assert run_ranks(of_llama, 2, wanted, options, torch.float64) == ["", ""]
    for what in run_ranks(of_llama, 2, wanted, {**options, "is_read": True}, torch.float64):
        assert "Expected blocks.0 to compute on 2 ranks what it computes on one, got a difference in output 1" in what


class NormBetween(nn.Module):
    """A norm over all features between two layers: its mean would be that of this rank's."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 16), nn.LayerNorm(16, elementwise_affine=False), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        return self.down(F.layer_norm(hidden, hidden.shape[-1:]))


class Twice(Rowwise):
    """A style with a fault: the bias is added twice."""

    def leave(self, frame: Any, module: nn.Module, output: Any, mesh: Any) -> Any:
        return super().leave(frame, module, output, mesh) + module._parameters["bias"].to_local()  # type: ignore[union-attr]


def of_two_layers(rank: int, size: int, kind: str) -> str:
    torch.manual_seed(0)
    if kind == "norm":
        model: nn.Module = nn.Sequential(NormBetween())
        return check(model, {"0.up": "colwise", "0.down": "rowwise"}, size, torch.randn(2, 8))
    model = nn.ModuleDict({"mlp": nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))})
    model.forward = lambda x: model["mlp"](x)  # type: ignore[method-assign]
    down: Any = Twice() if kind == "bias" else "rowwise"
    batch = torch.randn(2, 8) + (rank if kind == "inputs" else 0)
    return check(model, {"mlp.0": "colwise", "mlp.2": down}, size, batch)


def test_a_norm_between_is_found() -> None:
    for what in run_ranks(of_two_layers, 2, "norm"):
        assert "Expected 0 to compute on 2 ranks what it computes on one, got a difference in output 0" in what


def test_a_wrong_style_is_found() -> None:
    for what in run_ranks(of_two_layers, 2, "bias"):
        assert "Expected mlp to compute on 2 ranks" in what


def test_inputs_that_differ_are_found() -> None:
    for what in run_ranks(of_two_layers, 2, "inputs"):
        assert "Expected equal inputs of mlp on the 2 ranks that split it" in what


def test_nothing_is_found_where_nothing_is_wrong() -> None:
    assert run_ranks(of_two_layers, 2, "right") == ["", ""]


def of_shapes(rank: int, size: int) -> list[str]:
    model = llama(attention=CountingAttention)
    plan = resolve_plan(model, PLAN, tp=size)
    plan.counts = {}  # as if forward had not been understood
    apply(plan, list(model.modules()), model, init_device_mesh("cpu", (size,), mesh_dim_names=("tp",)))
    finish(plan, model)
    with pytest.raises(RuntimeError) as caught, recording(plan, model):
        loss_of(model(tokens(0)[0]), tokens(0)[1])
    return list(caught.value.__notes__)


def test_an_error_in_forward_gets_the_plan_as_a_note() -> None:
    for (note,) in run_ranks(of_shapes, 2):
        assert "The module runs with the tensor plan of tensor_plan, tp=2:" in note
        assert "  blocks.0.attn.wq: colwise" in note
