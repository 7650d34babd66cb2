"""Small models of transformers, split by their own plan or by their graph: the training of one process, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from loopwright.errors import ConfigError
from loopwright.strategies.mesh.tensor import resolve_plan
from loopwright.strategies.mesh.tensor.apply import apply, finish
from loopwright.strategies.mesh.tensor.verify import recording, verify_plan

transformers = pytest.importorskip("transformers", minversion="5.0", reason="plans of transformers 5")

from transformers_models import SMALL, TEXT, batch, model  # noqa: E402  # transformers may be absent

# Any in this file: transformers, which has no types here.

OF_PEFT = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.* is deprecated:FutureWarning")
TARGETS = ["embed_tokens", "q_proj", "v_proj", "o_proj", "down_proj", "lm_head"]


def full(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def adapted(kind: str) -> Any:
    """Return a model of transformers; "lora ..." with adapters of peft on layers of every style."""
    if not kind.startswith("lora "):
        return model(kind)
    import peft

    made = peft.get_peft_model(model(kind.removeprefix("lora ")), peft.LoraConfig(r=4, target_modules=TARGETS))
    for name, one in made.named_parameters():
        if "lora_B" in name or "lora_embedding_B" in name:
            nn.init.normal_(one, std=0.1)  # else it begins with zeros
    return made.double()


def train(rank: int, size: int, kind: str) -> dict[str, Any]:
    ours, theirs = adapted(kind), adapted(kind)
    plan = resolve_plan(ours, tp=size)
    apply(plan, list(ours.modules()), ours, init_device_mesh("cpu", (size,), mesh_dim_names=("tp",)))
    finish(plan, ours)
    # Norms of transformers compute in float32, whose rounding AdamW would make larger where gradients are small.
    trained = [[p for p in one.parameters() if p.requires_grad] for one in (ours, theirs)]
    optimizers = [torch.optim.AdamW(one, lr=1e-3, eps=1e-4) for one in trained]
    worst = 0.0
    for step in range(3):
        inputs = batch(kind.rpartition(" ")[2], step)
        if step == 0:
            with recording(plan, ours) as calls:
                loss = ours(**inputs).loss
            loss.backward()
            verify_plan(plan, ours, calls)
        else:
            loss = ours(**inputs).loss
            loss.backward()
        wanted = theirs(**inputs).loss
        wanted.backward()
        worst = max(worst, abs(loss.item() - wanted.item()))
        for one in optimizers:
            one.step()
            one.zero_grad()
    pairs = list(zip(ours.parameters(), theirs.parameters(), strict=True))
    return {
        "loss": worst,
        "weight": max(float((full(a) - b.detach()).abs().max()) for a, b in pairs),
        "styles": sorted({name.rpartition(".")[2] for name in plan.styles}),
        "source": plan.source,
        "plain": [name for name, one in ours.named_parameters() if not isinstance(one, DTensor)],
    }


ROPE = ["down_proj", "embed_tokens", "gate_proj", "k_proj", "lm_head", "o_proj", "q_proj", "up_proj", "v_proj"]
KINDS = {
    "llama": ("LlamaForCausalLM.tp_plan", ROPE),
    "qwen3": ("Qwen3ForCausalLM.tp_plan", sorted([*ROPE, "k_norm", "q_norm"])),
    "gemma3": ("Gemma3ForCausalLM.tp_plan", sorted([*ROPE, "k_norm", "q_norm"])),
    "gpt2": ("the graph", ["c_fc", "c_proj"]),
    "bert": ("the graph", ["dense", "key", "query", "value"]),
    "vit": ("the graph", ["fc1", "fc2", "k_proj", "o_proj", "q_proj", "v_proj"]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_trains_as_on_one_process(kind: str) -> None:
    source, styles = KINDS[kind]
    for found in run_ranks(train, 2, kind):
        assert found["source"] == source
        assert found["styles"] == styles
        assert found["plain"] == []
        assert found["loss"] <= 1e-10
        assert found["weight"] <= 1e-8  # norms compute in float32


@pytest.mark.parametrize("kind", ["llama", "qwen3"])  # qwen3 has a norm of keys
def test_more_ranks_than_heads_of_keys(kind: str) -> None:
    for found in run_ranks(train, 4, kind):
        assert found["loss"] <= 1e-10
        assert found["weight"] <= 1e-8


@OF_PEFT
def test_a_model_with_adapters_trains_as_on_one_process() -> None:
    pytest.importorskip("peft", reason="adapters")
    for found in run_ranks(train, 2, "lora llama"):
        assert {"base_layer", "default"} < set(found["styles"])
        assert found["loss"] <= 1e-10
        assert found["weight"] <= 1e-8


@OF_PEFT
def test_adapters_that_need_full_weights_are_refused_by_name() -> None:
    peft = pytest.importorskip("peft", reason="adapters")
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], use_dora=True)
    with pytest.raises(ConfigError) as caught:
        resolve_plan(peft.get_peft_model(model("llama"), config), tp=2)
    assert "layers.0.self_attn.q_proj is a layer of peft with lora_magnitude_vector, which cannot be split" in (
        caught.value.what
    )


def test_a_style_that_is_not_known_leaves_its_module_whole() -> None:
    one = model("llama")
    one._tp_plan = {}
    names = {"model.layers.*.mlp": "moe_tp_experts", "model.layers.*.mlp.gate_proj": "colwise"}

    class Planned(type(one)):  # type: ignore[misc]
        tp_plan = {**names, "lm_head": "colwise_gather_output"}

    one.__class__ = Planned
    plan = resolve_plan(one, tp=2)
    assert list(plan.styles) == ["lm_head"]
    assert plan.notes == ["model.layers.*.mlp of Planned.tp_plan has the style 'moe_tp_experts', and stays whole."]


def test_a_vocabulary_that_does_not_divide_stays_whole() -> None:
    config = transformers.LlamaConfig(**{**SMALL, **TEXT, "num_key_value_heads": 4, "vocab_size": 63})
    plan = resolve_plan(transformers.LlamaForCausalLM(config), tp=2)
    assert "lm_head" not in plan.styles
    assert "model.layers.0.mlp.down_proj" in plan.styles
    assert "lm_head has out_features=63, which tp=2 does not divide, and stays whole." in plan.notes


def test_fused_layers_of_gpt2_stay_whole_and_are_named() -> None:
    plan = resolve_plan(model("gpt2"), tp=2)
    assert any("attn.c_proj stays whole, with " in note for note in plan.notes)


def test_modules_may_be_on_the_meta_device() -> None:
    with torch.device("meta"):
        config = transformers.ViTConfig(**SMALL, image_size=16, patch_size=4, num_labels=5)
        one: nn.Module = transformers.ViTForImageClassification(config)
    assert len(resolve_plan(one, tp=4).styles) == 12
