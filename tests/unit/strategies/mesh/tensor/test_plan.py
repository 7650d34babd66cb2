"""Tensor plans: from names and shapes to styles, and what is wrong with them, before any process starts."""

from __future__ import annotations

from typing import Any

import pytest
from tensor_models import PLAN, CountingAttention, FusedAttention, SideBySide, llama
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel
from torch.nn.utils import parametrizations

from loopwright.errors import ConfigError
from loopwright.strategies.mesh.tensor.plan import resolve_plan, shown
from loopwright.strategies.mesh.tensor.styles import Colwise, Embedding, PackedColwise, Rowwise


def refusal(module: nn.Module, wanted: Any, **options: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        resolve_plan(module, wanted, **{"tp": 2, **options})
    return caught.value


def test_a_star_stands_for_one_name() -> None:
    plan = resolve_plan(llama(), PLAN, tp=2)
    assert len(plan.styles) == 2 * (4 + 3) + 2
    assert isinstance(plan.styles["blocks.1.attn.wq"], Colwise)
    assert isinstance(plan.styles["blocks.1.mlp.w2"], Rowwise)
    assert isinstance(plan.styles["tok"], Embedding)


def test_groups_hold_layers_that_belong_together() -> None:
    plan = resolve_plan(llama(blocks=1), PLAN, tp=2)
    assert sorted(plan.groups) == ["blocks.0.attn", "blocks.0.mlp", "head", "tok"]


def test_a_pattern_without_a_match_lists_the_layers() -> None:
    error = refusal(llama(blocks=1), {**PLAN, "layers.*.q": "colwise"})
    assert "pattern 'layers.*.q' of tensor_plan matches no module" in error.what
    assert "Linear layers and embeddings are: tok, blocks.0.attn.wq, " in error.what


def test_every_problem_is_named_at_once() -> None:
    error = refusal(llama(), {**PLAN, "nothing": "colwise", "norm": "colwis", "blocks.0.n1": "rowwise"})
    assert "'nothing'" in error.what
    assert "Expected a style for 'norm' of tensor_plan, got 'colwis' (did you mean 'colwise'?)" in error.what
    assert "blocks.0.n1 is a RMSNorm, and the style is for Linear layers" in error.what


def test_heads_that_do_not_divide_are_named() -> None:
    error = refusal(llama(width=24), PLAN, tp=3)
    assert "blocks.0.attn.wq has 4 heads; tp=3 does not divide them: 1, 2, 4 do" in error.what


def test_features_that_do_not_divide_are_named() -> None:
    error = refusal(nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4)), {"0": "colwise", "2": "rowwise"}, tp=4)
    assert "0 has out_features=6, which tp=4 does not divide" in error.what
    assert "2 has in_features=6, which tp=4 does not divide" in error.what


def test_a_layer_without_its_partner_is_named() -> None:
    error = refusal(llama(), {**PLAN, "head": "colwise"})
    assert "head has 'colwise', and no layer of the plan has 'rowwise' to go with it" in error.what


def test_counts_of_heads_are_divided_where_forward_reads_them() -> None:
    plan = resolve_plan(llama(attention=CountingAttention, blocks=1), PLAN, tp=2)
    assert plan.counts == {"blocks.0.attn": {"num_heads": (4, 2)}}
    assert resolve_plan(llama(), PLAN, tp=2).counts == {}


QUERIES = {"blocks.*.q": "colwise", "blocks.*.o": "rowwise"}


def test_counts_of_heads_are_divided_where_queries_and_keys_are_split() -> None:
    mlp = {"blocks.*.gate_up": "packed_colwise", "blocks.*.down": "rowwise"}
    assert resolve_plan(SideBySide(), mlp, tp=2).counts == {}
    plan = resolve_plan(SideBySide(keys=2), {**QUERIES, "blocks.*.[kv]": "colwise"}, tp=4)
    assert plan.counts["blocks.0"] == {"num_heads": (4, 1), "num_kv_heads": (2, 1), "n_rep": (2, 1)}
    assert shown(plan.styles["blocks.0.k"]) == "PackedColwise(parts=(8,), copies=(2,))"


def test_queries_without_their_keys_are_refused() -> None:
    error = refusal(SideBySide(keys=2), QUERIES)
    assert "blocks.0.k is full, and the queries beside it are split" in error.what


def test_a_computed_weight_is_refused_by_name() -> None:
    for change in (parametrizations.weight_norm, parametrizations.spectral_norm, nn.utils.spectral_norm):
        module = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
        change(module[0])
        error = refusal(module, {"0": "colwise", "2": "rowwise"})
        assert "0 computes its weight from " in error.what
        assert "(weight_norm, spectral_norm): it cannot be split" in error.what


def test_parts_of_a_fused_layer_must_add_up() -> None:
    wanted = {**PLAN, "blocks.*.attn.qkv": PackedColwise(parts=(16, 16, 8))}
    del wanted["blocks.*.attn.w[qkv]"]
    error = refusal(llama(attention=FusedAttention), wanted)
    assert "has out_features=48, and the parts [16, 16, 8] add up to 40" in error.what


def test_the_module_gives_its_plan() -> None:
    class Planned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = llama()

        def tensor_plan(self) -> dict[str, Any]:
            return {f"model.{name}": style for name, style in PLAN.items()}

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Planned()

    plan = resolve_plan(Outer(), tp=2)
    assert plan.source == "Planned.tensor_plan()"
    assert isinstance(plan.styles["inner.model.blocks.0.mlp.w2"], Rowwise)


def test_an_embedding_takes_the_style_of_its_tied_layer() -> None:
    plan = resolve_plan(llama(tied=True), {name: one for name, one in PLAN.items() if name != "tok"}, tp=2)
    assert isinstance(plan.styles["tok"], Embedding)
    assert plan.notes == ["tok is split too: its weight is tied to that of head."]


def test_tied_parameters_with_other_styles_are_named() -> None:
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
    model["b"].weight = model["a"].weight
    error = refusal(model, {"a": "colwise", "b": "rowwise"})
    assert "the tied parameters a.weight (S(0)), b.weight (S(1)) would be split differently" in error.what


def test_loss_parallel_needs_a_gathered_last_layer() -> None:
    error = refusal(llama(), {name: one for name, one in PLAN.items() if name != "head"}, loss_parallel=True)
    assert "needs a last layer with the style 'colwise_gather_output'" in error.what


def test_styles_of_torch_are_taken() -> None:
    plan = resolve_plan(llama(), {"blocks.*.mlp.w1": ColwiseParallel()}, tp=2)
    assert isinstance(plan.styles["blocks.0.mlp.w1"], ColwiseParallel)


@pytest.mark.parametrize("wanted", [3, "blocks"])
def test_something_else_is_no_plan(wanted: Any) -> None:
    assert (
        f"Expected tensor_plan= 'auto' or a dict of patterns and styles, got {wanted!r}"
        in refusal(llama(), wanted).what
    )
