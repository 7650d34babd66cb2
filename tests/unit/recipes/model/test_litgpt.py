"""Folders of LitGPT: the model that transformers computes from them, and what is refused."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from apart import APART
from recipe_models import ROPE, config, import_libraries
from torch import Tensor

from loopwright.errors import ConfigError
from loopwright.recipes.exporting.location import find_model
from loopwright.recipes.model.fingerprint import fingerprint_of_folder, fingerprint_problems
from loopwright.recipes.model.litgpt import config_file
from loopwright.recipes.model.loading import ModelSettings, model_problems, open_model, read_config

# Any in this file: models of transformers, and settings of LitGPT.

IDS = torch.arange(40).reshape(2, 20) * 7 % ROPE["vocab_size"]
LLAMA = {
    "name": "own", "block_size": 128, "n_layer": 2, "n_embd": 32, "vocab_size": 90, "padded_vocab_size": 96,
    "n_head": 4, "n_query_groups": 2, "intermediate_size": 48, "norm_eps": 1e-6, "bias": False,
    "mlp_class_name": "LLaMAMLP", "parallel_residual": False, "rotary_percentage": 1.0, "hf_config": {}, "n_expert": 0,
    "norm_class_name": "RMSNorm",
}  # fmt: skip
NEOX = {
    **LLAMA, "n_query_groups": 4, "norm_class_name": "LayerNorm", "bias": True, "mlp_class_name": "GptNeoxMLP",
    "parallel_residual": True, "rotary_percentage": 0.5, "rope_condense_ratio": 2, "norm_eps": 1e-5,
}  # fmt: skip
ROPE_8 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_seq_len": 32}
FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {  # model type, its settings, those of LitGPT
    "llama": ("llama", {}, LLAMA),
    "llama-3.1": (
        "llama",
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, "original_max_position_embeddings": 32}
         | {name: value for name, value in ROPE_8.items() if name != "original_max_seq_len"}},
        {**LLAMA, "rope_base": 500_000, "rope_adjustments": ROPE_8},
    ),
    "mistral": ("mistral", {}, {**LLAMA, "sliding_window_size": 6}),
    "qwen3": ("qwen3", {}, {**LLAMA, "head_size": 8, "norm_qk": True}),
}  # fmt: skip


def randomized(model: Any) -> Any:
    """Return the model with other values everywhere, so that no norm and no bias has no effect."""
    draw = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for one in model.parameters():
            one.add_(torch.randn(one.shape, generator=draw) * 0.1)
    return model.eval()


def as_litgpt(model: Any, *, grouped: bool = False) -> dict[str, Tensor]:
    """Return the weights of a model like Llama by the names of LitGPT."""
    state, found = model.state_dict(), {}
    names = {
        "input_layernorm": "norm_1", "post_attention_layernorm": "norm_2", "self_attn.o_proj": "attn.proj",
        "self_attn.q_norm": "attn.norm_q", "self_attn.k_norm": "attn.norm_k", "mlp.gate_proj": "mlp.fc_1",
        "mlp.up_proj": "mlp.fc_2", "mlp.down_proj": "mlp.proj",
    }  # fmt: skip
    for name, value in state.items():
        module, _, kind = name.rpartition(".")
        if ".layers." not in name:
            outer = {"model.embed_tokens": "transformer.wte", "model.norm": "transformer.ln_f", "lm_head": "lm_head"}
            found[f"{outer[module]}.{kind}"] = value
            continue
        number, _, part = module.removeprefix("model.layers.").partition(".")
        if part in names:
            found[f"transformer.h.{number}.{names[part]}.{kind}"] = value
        elif part == "self_attn.q_proj":
            parts = [state[name.replace("q_proj", f"{one}_proj")] for one in "qkv"]
            fused = torch.cat(parts)
            if grouped:
                fused = torch.cat(
                    [half for group in zip(*(one.chunk(2) for one in parts), strict=True) for half in group]
                )
            found[f"transformer.h.{number}.attn.{'attn' if grouped else 'qkv'}.{kind}"] = fused
    return found


def write(folder: Path, settings: dict[str, Any], weights: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "model_config.yaml").write_text(yaml.dump(settings))
    if weights is not None:
        torch.save(weights, folder / "lit_model.pth")
    return folder


def llama(**changes: Any) -> Any:
    import_libraries()
    from transformers import AutoModelForCausalLM

    return randomized(AutoModelForCausalLM.from_config(config("llama", **changes)))


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_model_that_litgpt_stored(tmp_path: Path, family: str) -> None:
    import_libraries()
    from transformers import AutoModelForCausalLM

    model_type, changes, settings = FAMILIES[family]
    model = randomized(AutoModelForCausalLM.from_config(config(model_type, **changes)))
    folder = write(tmp_path / "lit", settings, {"model": as_litgpt(model)})
    opened: Any = open_model(ModelSettings(folder))

    with torch.no_grad():
        assert torch.equal(opened.eval()(IDS).logits, model(IDS).logits)
    assert not model_problems(ModelSettings(folder))


def test_gpt_neox_and_its_rotary_share_are_read(tmp_path: Path) -> None:
    import_libraries()
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    rope = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0, "partial_rotary_factor": 0.5}
    sizes = {name: value for name, value in ROPE.items() if name != "num_key_value_heads"}
    model = randomized(GPTNeoXForCausalLM(GPTNeoXConfig(**sizes, rope_parameters=rope)))
    found = {}
    names = {
        "gpt_neox.embed_in": "transformer.wte", "gpt_neox.final_layer_norm": "transformer.ln_f", "embed_out": "lm_head",
        "gpt_neox.layers": "transformer.h", "input_layernorm": "norm_1", "post_attention_layernorm": "norm_2",
        "attention.dense": "attn.proj", "mlp.dense_h_to_4h": "mlp.fc", "mlp.dense_4h_to_h": "mlp.proj",
        "attention.query_key_value": "attn.qkv",
    }  # fmt: skip
    for name, value in model.state_dict().items():
        new = name
        for old, litgpt in names.items():
            new = new.replace(old, litgpt)
        if "query_key_value" in name:  # of each of 4 heads: 8 rows of the query, the key and the value
            value = torch.cat([value.reshape(4, 3, 8, -1)[:, one].reshape(32, -1) for one in range(3)])
            value = value.squeeze(-1) if name.endswith("bias") else value
        found[new] = value
    opened: Any = open_model(ModelSettings(write(tmp_path / "lit", NEOX, found)))

    with torch.no_grad():
        assert torch.equal(opened.eval()(IDS).logits, model(IDS).logits)


def test_rows_by_group_of_earlier_versions_and_names_of_compiled_models_are_read(tmp_path: Path) -> None:
    model = llama()
    weights = {f"_orig_mod.{name}": value for name, value in as_litgpt(model, grouped=True).items()}
    assert "_orig_mod.transformer.h.0.attn.attn.weight" in weights
    opened: Any = open_model(ModelSettings(write(tmp_path / "lit", LLAMA, weights)))

    with torch.no_grad():
        assert torch.equal(opened.eval()(IDS).logits, model(IDS).logits)


def test_dtype_and_tied_weights_follow_the_file(tmp_path: Path) -> None:
    weights = as_litgpt(llama())
    apart = read_config(ModelSettings(write(tmp_path / "apart", LLAMA, weights)))
    weights = {name: value.bfloat16() for name, value in weights.items()}
    weights["lm_head.weight"] = weights["transformer.wte.weight"]
    folder = write(tmp_path / "tied", LLAMA, weights)
    tied = read_config(ModelSettings(folder))

    assert (apart.tie_word_embeddings, apart.dtype) == (False, torch.float32)
    assert (tied.tie_word_embeddings, tied.dtype) == (True, torch.bfloat16)
    assert tied.eos_token_id is None  # not the number that transformers assumes for Llama
    opened: Any = open_model(ModelSettings(folder))
    assert opened.lm_head.weight is opened.model.embed_tokens.weight


def test_training_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    folder = write(tmp_path / "lit", LLAMA, as_litgpt(llama()))
    before, stored = (folder / "lit_model.pth").read_bytes(), fingerprint_of_folder(folder)
    model = open_model(ModelSettings(folder))
    with torch.no_grad():
        for one in model.parameters():
            one.zero_()

    assert (folder / "lit_model.pth").read_bytes() == before
    assert fingerprint_problems(stored, folder) == []
    assert find_model(folder).kind == "folder"
    torch.save({"transformer.wte.weight": torch.ones(2)}, folder / "lit_model.pth")
    assert any("lit_model.pth" in one for one in fingerprint_problems(stored, folder))


def test_weights_for_transformers_beside_those_of_litgpt_are_preferred(tmp_path: Path) -> None:
    folder = write(tmp_path / "lit", LLAMA, {})
    assert config_file(folder) == folder / "model_config.yaml"
    llama().save_pretrained(folder)
    assert config_file(folder) is None


class Code:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("executed",)


@pytest.mark.parametrize(
    ("weights", "problem"),
    [
        ({"model": Code()}, r"Expected tensors and plain values in .*lit_model\.pth, got other objects"),
        ({"model": {"lm_head.weight": torch.ones(1)}}, r"got no transformer\.wte\.weight"),
        (
            None,
            r"Expected lit_model\.pth in the LitGPT folder .*, got lit_model\.pth\.lora; `litgpt merge_lora` merges",
        ),
        (b"PK", r"Expected the weights of LitGPT, got .*lit_model\.pth, which cannot be read"),
    ],
)
def test_unusable_weights_are_named_and_nothing_is_executed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: Any, problem: str
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = write(tmp_path / "lit", LLAMA, None if isinstance(weights, bytes) else weights)
    (folder / "lit_model.pth.lora").touch()
    if isinstance(weights, bytes):
        (folder / "lit_model.pth").write_bytes(weights)

    found = "\n".join(model_problems(ModelSettings(folder)))
    assert re.search(problem, found), found
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"name": "Mixtral", "mlp_class_name": "LLaMAMoE", "n_expert": 8}, "Mixtral with mlp_class_name=LLaMAMoE"),
        ({"final_logit_softcapping": 30.0}, "own with final_logit_softcapping=30.0"),
        ({"name": "Gemma-x"}, "Gemma-x with mlp_class_name=LLaMAMLP"),
        ({"norm_class_name": "LayerNorm"}, "norm_class_name=LayerNorm"),
        ({"rotary_percentage": 0.75}, "rotary_percentage=0.75"),
        ({"sliding_window_size": 4, "sliding_window_indices": [0, 1]}, r"sliding_window_indices=\[0, 1\]"),
        ({"rope_adjustments": {"factor": 2.0, "beta_fast": 32}}, "rope_adjustments="),
        ({"setting_of_a_later_version": 3}, "setting_of_a_later_version=3"),
    ],
)
def test_other_families_are_refused_by_name(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    folder = write(tmp_path / "lit", {**LLAMA, **changes}, None)
    with pytest.raises(ConfigError, match=rf"as GPT-NeoX, Llama, .* or Gemma of transformers do, got .*{named}"):
        read_config(ModelSettings(folder, needs_weights=False))


@pytest.mark.parametrize(
    "changes",
    [
        {"n_head": 0}, {"n_layer": -1}, {"n_embd": "32"}, {"padded_vocab_size": 9.5}, {"rope_base": "x"},
        {"rope_adjustments": 5}, {"sliding_window_size": 4, "sliding_window_indices": 5},
    ],
)  # fmt: skip
def test_damaged_settings_are_named(tmp_path: Path, changes: dict[str, Any]) -> None:
    folder = write(tmp_path / "lit", {**LLAMA, **changes}, None)
    name, value = changes.popitem()
    with pytest.raises(ConfigError, match=rf"settings of a LitGPT model, got {name}={value!r} in "):
        read_config(ModelSettings(folder, needs_weights=False))


def test_an_adapter_of_litgpt_that_is_not_merged_is_refused(tmp_path: Path) -> None:
    weights = as_litgpt(llama())
    weights["transformer.h.0.attn.qkv.lora_A"] = torch.ones(2, 32)
    with pytest.raises(ConfigError, match=r"without adapters, got transformer\.h\.0\.attn\.qkv\.lora_A") as caught:
        open_model(ModelSettings(write(tmp_path / "lit", LLAMA, weights)))
    assert "litgpt merge_lora" in caught.value.fix


def test_weights_of_another_size_are_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "lit", {**LLAMA, "n_query_groups": 4}, as_litgpt(llama()))
    with pytest.raises(ConfigError, match=r"Expected 96 rows of queries, keys and values, .*got 64"):
        open_model(ModelSettings(folder))


GEMMA = {"name": "Gemma-x", "mlp_class_name": "GemmaMLP", "scale_embeddings": True, "gelu_approximate": "tanh"}
MODELS = {
    "llama": LLAMA, "biased": {**LLAMA, "bias": True}, "qwen2": {**LLAMA, "attn_bias": True},
    "gemma": {**LLAMA, **GEMMA}, "gpt_neox": NEOX,
}  # fmt: skip
PROGRAM = f"""
import torch
from pathlib import Path
from litgpt.config import Config
from litgpt.model import GPT
from litgpt.utils import save_config

for name, settings in {MODELS}.items():
    folder = Path(name)
    folder.mkdir()
    torch.manual_seed(0)
    model = GPT(Config(**settings))
    with torch.no_grad():
        for one in model.parameters():
            one.add_(torch.randn_like(one) * 0.1)
        save_config(model.config, folder)
        torch.save({{"model": model.state_dict()}}, folder / "lit_model.pth")
        torch.save(model(torch.arange(40).reshape(2, 20) * 7 % 96), folder / "logits.pt")
"""


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the models as LitGPT itself stores them, each beside the logits that it computes."""
    lightning = APART.parent / "lightning"
    if not (APART / "litgpt").is_dir() or not (lightning / "lightning").is_dir():
        pytest.skip("no LitGPT: make .venv/apart/installed .venv/lightning/installed")
    folder = tmp_path_factory.mktemp("litgpt")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (APART, lightning)))}
    program = [sys.executable, "-W", "ignore", "-c", PROGRAM]
    done = subprocess.run(program, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_litgpt(stored: Path, name: str) -> None:
    import_libraries()
    model: Any = open_model(ModelSettings(stored / name)).eval()

    with torch.no_grad():
        # Sums of float32 in another order: 1e-6 of values up to 4 was measured.
        torch.testing.assert_close(model(IDS).logits, torch.load(stored / name / "logits.pt"), atol=1e-5, rtol=0)
