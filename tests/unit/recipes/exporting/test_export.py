"""Exported folders: plain transformers and peft compute with them what was trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from recipe_models import import_libraries
from torch import Tensor
from trained_models import adapter_folder, model_folder, open_adapter, open_plain, run_folder, trained_state

from loopwright.errors import CheckpointError, ConfigError
from loopwright.recipes.exporting import export as export_module
from loopwright.recipes.exporting.export import ExportSettings, export, export_run
from loopwright.recipes.exporting.merge import last_hidden, merge_adapter, sample_ids, without_adapter

# Any in this file: transformers and peft, which have no types here.

FAMILIES = ("llama", "qwen3", "gemma3", "gpt2")


@pytest.fixture(scope="module", autouse=True)
def _imported() -> None:
    import_libraries()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("base") / "llama")


@pytest.fixture(scope="module")
def run(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_folder(tmp_path_factory.mktemp("lora") / "run", base)


def logits(model: Any) -> Tensor:
    with torch.inference_mode():
        result: Tensor = model(input_ids=sample_ids(model)).logits
    return result


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_merged_model_has_the_hidden_states_of_its_adapter(family: str, dora: bool, tmp_path: Path) -> None:
    base = model_folder(tmp_path / "base", family)
    adapter = adapter_folder(tmp_path / "adapter", base, use_dora=dora, fan_in_fan_out=family == "gpt2")
    adapted = open_adapter(base, adapter).double()
    ids = sample_ids(adapted)
    expected, plain = last_hidden(adapted, ids), without_adapter(adapted, ids)
    assert (expected - plain).abs().max() > 0.05, "an adapter without effect shows nothing"
    merged = merge_adapter(adapted)
    # The norms of most models round through float32, also in float64.
    assert (last_hidden(merged, ids) - expected).abs().max() < 1e-6
    assert not any("lora" in name for name, _ in merged.named_parameters())


def test_a_tied_layer_is_separated_before_it_is_merged(tmp_path: Path) -> None:
    base = model_folder(tmp_path / "base", tie_word_embeddings=True)
    with pytest.warns(UserWarning, match="tie_word_embeddings"):
        adapter = adapter_folder(tmp_path / "adapter", base, target_modules=["lm_head", "q_proj"])
    with pytest.warns(UserWarning, match="tie_word_embeddings"):
        model = open_adapter(base, adapter)
    expected = logits(model)
    embedding = model.get_input_embeddings().weight.clone()
    with pytest.warns(UserWarning, match="tie_word_embeddings"):
        report = export(ExportSettings(adapter, tmp_path / "out", merge=True, base=base))
    assert report.kind == "merged"
    exported = open_plain(tmp_path / "out")
    assert torch.equal(exported.get_input_embeddings().weight, embedding)
    assert (exported.get_output_embeddings().weight - embedding).abs().max() > 1e-3
    torch.testing.assert_close(logits(exported), expected, rtol=0, atol=1e-5)


def test_an_adapted_embedding_is_exported_and_merged(base: Path, tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", base, targets=["embed_tokens", "q_proj"])
    adapter = export_run(run, tmp_path / "adapter")
    merged = export_run(run, tmp_path / "merged", merge=True)
    assert adapter.effect == merged.effect
    torch.testing.assert_close(logits(open_plain(merged.to)), logits(open_adapter(base, adapter.to)), rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_fully_trained_run_is_loaded_by_plain_transformers(family: str, tmp_path: Path) -> None:
    base = model_folder(tmp_path / "base", family)
    run = run_folder(tmp_path / "run", base, "full")
    report = export_run(run, tmp_path / "out")
    assert (report.kind, report.dtype, report.reloaded) == ("model", "float32", 0.0)
    trained = open_plain(base)
    before = logits(trained)
    trained.load_state_dict(trained_state(run))
    exported = open_plain(tmp_path / "out")
    assert torch.equal(logits(exported), logits(trained))
    assert not torch.equal(logits(exported), before)
    assert exported.config.use_cache
    weights = {
        one.data_ptr() for one in (exported.get_input_embeddings().weight, exported.get_output_embeddings().weight)
    }
    assert len(weights) == (1 if exported.config.tie_word_embeddings else 2)


def test_an_adapter_is_loaded_by_plain_peft(base: Path, run: Path, tmp_path: Path) -> None:
    report = export_run(run, tmp_path / "out")
    assert report.kind == "adapter"
    assert report.effect is not None
    assert report.effect > 1e-3
    assert {"adapter_model.safetensors", "adapter_config.json", "README.md", "recipe.json"} <= set(report.files)
    from safetensors.torch import load_file

    saved = load_file(tmp_path / "out" / "adapter_model.safetensors")
    state = trained_state(run)
    assert {name.replace(".weight", ".default.weight") for name in saved} == state.keys()
    for name, value in saved.items():
        assert torch.equal(value, state[name.replace(".weight", ".default.weight")])
    adapted = open_adapter(base, tmp_path / "out")
    assert not torch.equal(logits(adapted), logits(open_plain(base)))


def test_a_merge_reports_held_out_losses_and_keeps_the_base(base: Path, run: Path, tmp_path: Path) -> None:
    stored = (base / "model.safetensors").read_bytes()
    report = export(ExportSettings(run, tmp_path / "out", merge=True))
    assert report.losses is not None
    assert report.losses.tokens > 20
    assert report.losses.after == pytest.approx(report.losses.before, abs=1e-5)
    assert report.losses.quantized is None
    assert "held-out loss" in report.describe()
    assert (base / "model.safetensors").read_bytes() == stored
    adapted = open_adapter(base, export_run(run, tmp_path / "adapter").to)
    torch.testing.assert_close(logits(open_plain(tmp_path / "out")), logits(adapted), rtol=0, atol=1e-5)


def test_a_merge_of_a_quantized_run_is_into_the_unquantized_base(base: Path, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    run = run_folder(tmp_path / "run", base, "nf4")
    report = export(ExportSettings(run, tmp_path / "out", merge=True))
    assert report.losses is not None
    assert report.losses.quantized is not None
    assert abs(report.losses.quantized - report.losses.before) > 1e-4
    assert "quantized base, as trained" in report.describe()
    plain, merged = open_plain(base), open_plain(tmp_path / "out")
    assert not getattr(merged, "is_quantized", False)
    difference = merged.get_input_embeddings().weight - plain.get_input_embeddings().weight
    assert not difference.any()
    first = "model.layers.0.self_attn.q_proj"
    state = trained_state(run)
    delta = (
        2.0
        * state[f"base_model.model.{first}.lora_B.default.weight"]
        @ state[f"base_model.model.{first}.lora_A.default.weight"]
    )
    expected = plain.get_submodule(first).weight + delta
    torch.testing.assert_close(merged.get_submodule(first).weight, expected, rtol=0, atol=1e-6)


def test_weights_are_sharded_and_cast_as_asked(run: Path, tmp_path: Path) -> None:
    report = export(ExportSettings(run, tmp_path / "out", merge=True, dtype="bfloat16", max_shard_size="40KB"))
    assert report.dtype == "bfloat16"
    assert "model.safetensors.index.json" in report.files
    assert sum(name.endswith(".safetensors") for name in report.files) > 2
    exported = open_plain(tmp_path / "out")
    assert {one.dtype for one in exported.parameters()} == {torch.bfloat16}


def test_the_folder_has_tokenizer_template_end_tokens_and_a_card(run: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer, GenerationConfig

    export(ExportSettings(run, tmp_path / "model-a", merge=True))
    out = tmp_path / "model-a"
    tokenizer = AutoTokenizer.from_pretrained(out)
    source = AutoTokenizer.from_pretrained(run / "tokenizer")
    assert tokenizer.chat_template == source.chat_template
    assert tokenizer("the quick brown fox")["input_ids"] == source("the quick brown fox")["input_ids"]
    assert GenerationConfig.from_pretrained(out).eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")
    card = (out / "README.md").read_text()
    assert card.startswith("---\n")
    assert "base_model: llama" in card
    assert "max_length: 64" in card
    assert "Held-out loss" in card
    assert str(tmp_path) not in card
    assert str(run) not in card


def test_another_base_is_refused_by_name(base: Path, run: Path, tmp_path: Path) -> None:
    other = model_folder(tmp_path / "other", seed=4)
    wide = model_folder(tmp_path / "wide", hidden_size=64)
    short = model_folder(tmp_path / "short", num_hidden_layers=1)
    export_run(run, tmp_path / "out")
    foreign = adapter_folder(tmp_path / "foreign", base)  # without a fingerprint
    refused = ((tmp_path / "out", other), (run / "checkpoints" / "last.ckpt", other), (foreign, wide), (foreign, short))
    for model, wrong in refused:
        with pytest.raises(ConfigError, match=rf"base: Expected the model that the adapter .* got {wrong}"):
            export(ExportSettings(model, tmp_path / "no", base=wrong))
    assert not (tmp_path / "no").exists()


def test_an_adapter_without_effect_is_refused(base: Path, tmp_path: Path) -> None:
    adapter = adapter_folder(tmp_path / "adapter", base)
    from safetensors.torch import load_file, save_file

    weights = load_file(adapter / "adapter_model.safetensors")
    save_file({name: one.zero_() for name, one in weights.items()}, adapter / "adapter_model.safetensors")
    with pytest.raises(ConfigError, match="an adapter that changes its base"):
        export(ExportSettings(adapter, tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_what_differs_when_loaded_again_is_not_published(
    base: Path, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = export_module.write_weights

    def damaged(model: Any, opened: Any, folder: Path, **options: Any) -> None:
        write(model, opened, folder, **options)
        from safetensors.torch import load_file, save_file

        file = folder / "adapter_model.safetensors"
        weights = load_file(file)
        weights[next(iter(weights))] *= 1.5
        save_file(weights, file)

    monkeypatch.setattr(export_module, "write_weights", damaged)
    with pytest.raises(CheckpointError, match="Expected the folder that was written to give the hidden states"):
        export(ExportSettings(run, tmp_path / "out"))
    assert list(tmp_path.iterdir()) == []


def test_all_problems_are_named_at_once(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(ConfigError) as error:
        export(ExportSettings(tmp_path / "none", tmp_path / "out", dtype="int3", limit=0, device="tpu9"))
    assert [line.strip().partition(":")[0] for line in error.value.what.splitlines()[1:]] == [
        "dtype",
        "device",
        "to",
        "limit",
    ]


def test_a_model_without_an_adapter_is_not_merged(base: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="merge: Expected an adapter"):
        export(ExportSettings(base, tmp_path / "out", merge=True))


def test_recipe_json_tells_how_prompts_were_written(base: Path, run: Path, tmp_path: Path) -> None:
    report = export_run(run, tmp_path / "out")
    recipe = json.loads((report.to / "recipe.json").read_text())
    assert recipe["settings"] == {"command": "finetune", "max_length": 64, "packing": False}
    assert recipe["fingerprint"]["shapes"]["model.norm.weight"] == [32]
