"""Tensor parallelism on gloo: the same training as on one process, in float64."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from ranks import run_ranks
from tensor_models import (
    PLAN,
    CountingAttention,
    FusedAttention,
    SideBySide,
    llama,
    loss_of,
    tokens,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from loopwright.errors import ModuleError
from loopwright.strategies.distributed.clipping import scale_to_norm, total_norm
from loopwright.strategies.mesh.tensor.apply import apply, finish
from loopwright.strategies.mesh.tensor.loss import PlainLoss, losses_in_parts
from loopwright.strategies.mesh.tensor.plan import TensorPlan, resolve_plan
from loopwright.strategies.mesh.tensor.styles import PackedColwise
from loopwright.strategies.mesh.tensor.verify import recording, verify_plan

# Any in this file: options that travel between processes.


def full(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def split(module: nn.Module, wanted: Any, size: int, **options: Any) -> TensorPlan:
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
    plan = resolve_plan(module, wanted, tp=size, **options)
    apply(plan, list(module.modules()), module, mesh)
    finish(plan, module)
    return plan


def train(
    rank: int,
    size: int,
    wanted: Any,
    options: dict[str, Any],
    optimizer: dict[str, Any],
    parallel: dict[str, bool] | None = None,
) -> dict[str, float]:
    """Train a model on several ranks and on this one alone; return the largest differences."""
    module, alone = llama(**options), llama(**options)
    plan = split(module, wanted, size, **(parallel or {}))
    ours = torch.optim.AdamW(module.parameters(), lr=1e-2, **optimizer)
    theirs = torch.optim.AdamW(alone.parameters(), lr=1e-2, **optimizer)
    worst = {"loss": 0.0, "gradient": 0.0, "norm": 0.0}
    for step in range(5):
        x, y = tokens(step)
        wanted_loss = loss_of(alone(x), y)
        wanted_loss.backward()
        in_parts = (losses_in_parts(), PlainLoss(plan.mesh)) if plan.loss_parallel else (nullcontext(), nullcontext())
        with in_parts[0], in_parts[1]:
            with recording(plan, module) if step == 0 else nullcontext({}) as calls:
                loss = loss_of(module(x), y)
            loss.backward()
            if step == 0:
                verify_plan(plan, module, calls)
        assert type(loss) is Tensor
        gradients = [one.grad for one in module.parameters() if one.grad is not None]
        pairs = zip(gradients, alone.parameters(), strict=True)
        worst["gradient"] = max(worst["gradient"], *(float((full(a) - b.grad).abs().max()) for a, b in pairs))
        norm, wanted_norm = total_norm(gradients, 2.0), nn.utils.clip_grad_norm_(alone.parameters(), 0.5)
        scale_to_norm(gradients, 0.5, norm)
        worst["loss"] = max(worst["loss"], abs(loss.item() - wanted_loss.item()))
        worst["norm"] = max(worst["norm"], abs(norm.item() - wanted_norm.item()))
        for one in (ours, theirs):
            one.step()
            one.zero_grad()
    assert all(isinstance(one, DTensor) for one in module.parameters())
    assert not any(isinstance(one, DTensor) for one in module.buffers())
    pairs = zip(module.parameters(), alone.parameters(), strict=True)
    worst["weight"] = max(float((full(a) - b.detach()).abs().max()) for a, b in pairs)
    return worst


def assert_equal(results: list[dict[str, float]]) -> None:
    for worst in results:
        assert worst["loss"] <= 1e-13
        assert worst["norm"] <= 1e-13
        assert worst["gradient"] <= 1e-14
        assert worst["weight"] <= 1e-12


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("optimizer", [{"foreach": True}, {"fused": True}], ids=["foreach", "fused"])
def test_training_is_that_of_one_process(size: int, optimizer: dict[str, Any]) -> None:
    assert_equal(run_ranks(train, size, PLAN, {}, optimizer))


def test_tied_weights_stay_tied() -> None:
    assert_equal(run_ranks(train, 2, PLAN, {"tied": True}, {}))
    assert_equal(run_ranks(train, 2, {name: one for name, one in PLAN.items() if name != "tok"}, {"tied": True}, {}))


def test_counted_heads_and_biases() -> None:
    assert_equal(run_ranks(train, 2, PLAN, {"attention": CountingAttention}, {}))


def test_a_fused_layer_with_declared_parts() -> None:
    wanted = {name: one for name, one in PLAN.items() if name != "blocks.*.attn.w[qkv]"}
    wanted["blocks.*.attn.qkv"] = PackedColwise(parts=3)
    assert_equal(run_ranks(train, 2, wanted, {"attention": FusedAttention}, {}))


def train_all(rank: int, size: int, cases: list[tuple[Any, dict[str, Any]]]) -> list[dict[str, float]]:
    return [train(rank, size, wanted, {"kind": SideBySide, **options}, {}) for wanted, options in cases]


QUERIES = {"blocks.*.q": "colwise", "blocks.*.o": "rowwise"}
HEADS_SPLIT = {**QUERIES, "blocks.*.[kv]": "colwise"}
FEATURES_SPLIT = {"blocks.*.gate_up": "packed_colwise", "blocks.*.down": "rowwise"}


def test_attention_and_mlp_of_one_class() -> None:
    cases = [
        (FEATURES_SPLIT, {}),
        (HEADS_SPLIT, {}),
        ({**HEADS_SPLIT, **FEATURES_SPLIT}, {"keys": 2, "is_eager": True}),
        ({**HEADS_SPLIT, **FEATURES_SPLIT}, {"keys": 1}),
        (QUERIES, {"keys": 1}),  # keys and values are added to the plan
        ("auto", {"keys": 1}),
    ]
    for results in run_ranks(train_all, 2, cases):
        assert_equal(results)


def test_more_ranks_than_heads_of_keys() -> None:
    cases = [(HEADS_SPLIT, {"keys": 2, "is_eager": True}), (HEADS_SPLIT, {"keys": 1}), ("auto", {"keys": 2})]
    for results in run_ranks(train_all, 4, cases):
        assert_equal(results)


def test_a_fused_layer_of_three_parts_by_its_name() -> None:
    wanted = {name: one for name, one in PLAN.items() if name != "blocks.*.attn.w[qkv]"}
    wanted["blocks.*.attn.qkv"] = "packed_colwise"
    assert_equal(run_ranks(train, 2, wanted, {"attention": FusedAttention}, {}))


def test_styles_of_torch() -> None:
    wanted = {**PLAN, "blocks.*.mlp.w[13]": ColwiseParallel(), "blocks.*.mlp.w2": RowwiseParallel()}
    assert_equal(run_ranks(train, 2, wanted, {}, {}))


BOTH = [{"sequence_parallel": True}, {"loss_parallel": True}, {"sequence_parallel": True, "loss_parallel": True}]


@pytest.mark.parametrize("parallel", BOTH, ids=["sequence", "loss", "both"])
def test_sequence_and_loss_in_parts(parallel: dict[str, bool]) -> None:
    options = {"tied": True, "attention": CountingAttention}
    assert_equal(run_ranks(train, 2, PLAN, options, {}, parallel))


def test_sequence_and_loss_in_parts_on_four_ranks() -> None:
    assert_equal(run_ranks(train, 4, PLAN, {"blocks": 3}, {}, BOTH[2]))


def test_sequence_in_parts_by_the_graph() -> None:
    assert_equal(run_ranks(train, 2, "auto", {"attention": FusedAttention}, {}, BOTH[0]))


def of_length(rank: int, size: int) -> str:
    module = llama()
    split(module, PLAN, size, sequence_parallel=True)
    with pytest.raises(ModuleError) as caught:
        module(tokens(0, length=7)[0])
    return caught.value.what


def test_a_sequence_that_does_not_divide_is_refused() -> None:
    for what in run_ranks(of_length, 2):
        assert what == "Expected a size of dimension 1 that tp=2 divides, got shape (4, 7, 16)."


def placements(rank: int, size: int) -> dict[str, Any]:
    module = llama(tied=True)
    module.tok.weight.note = "kept"  # type: ignore[attr-defined]
    module.norm.weight.requires_grad_(False)
    split(module, PLAN, size)
    module(tokens(0)[0]).sum().backward()
    shown = {name: one.placements for name, one in module.named_parameters()}
    local = module.blocks[0].mlp.w1.weight.to_local()  # type: ignore[union-attr]
    return {
        "shown": shown,
        "is_tied": module.head.weight is module.tok.weight,
        "note": module.tok.weight.note,
        "frozen": module.norm.weight.grad is None and not module.norm.weight.requires_grad,
        "bytes": local.untyped_storage().nbytes(),
    }


def test_parameters_are_shards_with_memory_of_their_own() -> None:
    for found in run_ranks(placements, 2):
        assert found["shown"]["tok.weight"] == (Shard(0),)
        assert found["shown"]["blocks.0.attn.wo.weight"] == (Shard(1),)
        assert found["shown"]["blocks.0.n1.weight"] == (Replicate(),)
        assert found["is_tied"]
        assert found["note"] == "kept"
        assert found["frozen"]
        assert found["bytes"] == 32 * 16 * 8 // 2
