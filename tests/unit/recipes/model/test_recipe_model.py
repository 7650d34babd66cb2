"""Models of recipes: what is opened, with which values, and every mistake in the settings."""

from __future__ import annotations

import importlib.metadata
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from recipe_models import config, import_libraries, save_model, settings

from loopwright import ConfigError
from loopwright.recipes.model.loading import (
    LoraSettings,
    ModelSettings,
    meta_model,
    model_problems,
    open_model,
    open_tokenizer,
    read_config,
    skeleton,
)
from loopwright.recipes.strategy_checks import strategy_problems
from loopwright.strategies import DeepSpeedStrategy, MeshStrategy, Strategy


@pytest.fixture(scope="module", autouse=True)
def _imported() -> None:
    import_libraries()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("saved") / "llama", dtype=torch.bfloat16)


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_adapters_begin_at_the_base(folder: Path, kind: str) -> None:
    from safetensors.torch import load_file

    model = open_model(settings(folder, kind))
    saved = load_file(folder / "model.safetensors")
    state = model.state_dict()
    for name, one in saved.items():
        found = state.get(f"base_model.model.{name}")
        if found is None:
            found = state[f"base_model.model.{name.removesuffix('weight')}base_layer.weight"]
        assert found.dtype == torch.bfloat16
        assert torch.equal(found, one), name
    trained = {name: one for name, one in model.named_parameters() if one.requires_grad}
    assert trained
    assert all("lora_" in name and one.dtype == torch.float32 for name, one in trained.items())
    assert all(not one.any() for name, one in trained.items() if "lora_B" in name)
    assert all(one.any() for name, one in trained.items() if "lora_A" in name)


def test_evaluation_leaves_quantized_weights_as_they_are(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modules = pytest.importorskip("bitsandbytes.nn.modules")
    # Of some processors only; there, bitsandbytes packs weights anew in the first evaluation.
    monkeypatch.setattr(modules, "has_avx512bf16", lambda: True)
    model = open_model(settings(folder, "nf4"))
    before = {name: one.clone() for name, one in model.state_dict().items()}
    ids = torch.arange(16)[None]
    trained = model(input_ids=ids).logits
    with torch.no_grad():
        evaluated = model.eval()(input_ids=ids).logits
    assert torch.equal(evaluated, trained)
    for name, one in model.state_dict().items():  # packed weights are NaN as often as not: their bits are compared
        assert torch.equal(one.reshape(-1).view(torch.uint8), before[name].reshape(-1).view(torch.uint8)), name


def test_all_parameters_are_trained_in_float32(folder: Path) -> None:
    model = open_model(settings(folder))
    assert {one.dtype for one in model.parameters()} == {torch.float32}
    assert all(one.requires_grad for one in model.parameters())
    assert not model.config.use_cache


@pytest.mark.parametrize("is_file", [True, False])
def test_random_values_depend_on_the_seed_only(tmp_path: Path, is_file: bool) -> None:
    config("llama").save_pretrained(tmp_path)
    path = tmp_path / "config.json" if is_file else tmp_path
    before = torch.get_rng_state()
    one, same, other = (
        open_model(ModelSettings(path, from_scratch=True, seed=seed)).state_dict()["lm_head.weight"]
        for seed in (1, 1, 2)
    )
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert float(one.std()) == pytest.approx(0.02, rel=0.1)


def test_gradient_checkpointing_is_set(folder: Path) -> None:
    assert open_model(settings(folder, "lora", gradient_checkpointing=True)).is_activation_checkpointing
    assert not open_model(settings(folder, "lora")).is_activation_checkpointing


def test_a_skeleton_takes_no_memory(folder: Path) -> None:
    model = skeleton(settings(folder, "lora"))
    assert {one.device.type for one in model.parameters()} == {"meta"}
    assert sum(one.numel() for one in model.parameters()) == sum(
        one.numel() for one in open_model(settings(folder)).parameters()
    )


def test_counts_of_a_model_with_adapters_need_no_memory(folder: Path) -> None:
    meta, real = meta_model(settings(folder, "lora")), open_model(settings(folder, "lora"))
    assert {one.device.type for one in meta.parameters()} == {"meta"}
    found, expected = (
        {name: (one.shape, one.requires_grad) for name, one in model.named_parameters()} for model in (meta, real)
    )
    assert found == expected


# -- mistakes ----------------------------------------------------------------------------------------------------------


def test_correct_settings_have_no_problems(folder: Path) -> None:
    assert model_problems(settings(folder)) == []
    assert model_problems(settings(folder, "dora")) == []
    assert model_problems(ModelSettings(folder / "config.json", from_scratch=True)) == []
    assert (
        model_problems(ModelSettings(folder, lora=LoraSettings(targets=["q_proj", "model.layers.1.mlp.up_proj"]))) == []
    )
    assert model_problems(ModelSettings(folder, lora=LoraSettings(targets=r".*\.[qv]_proj"))) == []


def rewritten(folder: Path, to: Path, **changes: Any) -> Path:
    """Return a folder whose configuration differs."""
    to.mkdir()
    for file in folder.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    content = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps({**content, **changes}))
    return to


def test_wrong_paths_are_named(folder: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    bare = tmp_path / "bare"
    config("llama").save_pretrained(bare)
    adapter = tmp_path / "adapter"
    open_model(settings(folder, "lora")).save_pretrained(adapter)
    coded = rewritten(folder, tmp_path / "coded", auto_map={"AutoModelForCausalLM": "own.Own"})
    packed = rewritten(folder, tmp_path / "packed", quantization_config={"quant_method": "gptq"})
    unknown = rewritten(folder, tmp_path / "unknown", model_type="of_tomorrow")
    vision = rewritten(folder, tmp_path / "vision", model_type="vit")
    broken = rewritten(folder, tmp_path / "broken")
    (broken / "config.json").write_text("{")
    expected = {
        tmp_path / "absent": "model: Expected an existing path, got .*; allow_download is false",
        empty: "model: Expected a folder with config.json, got .*empty",
        bare: r"model: Expected weights \(model.safetensors or .*\), got none in .*bare",
        adapter: "model: Expected a folder with config.json, got .*adapter, an adapter of .*llama; pass its base",
        folder / "config.json": "model: Expected a folder with weights, got the file .*; pass a folder that has them",
        coded: "trust_remote_code: Expected true for .*coded, whose model is code in its folder, got false",
        packed: "model: Expected weights that are not quantized, got gptq",
        unknown: "model: Expected the configuration of a causal language model, got .*unknown .*of_tomorrow",
        vision: "model: Expected the configuration of a causal language model, got .*vision",
        broken: "model: Expected JSON in .*config.json, got ",
    }
    for path, problem in expected.items():
        found = model_problems(settings(path))
        assert len(found) == 1, (path, found)
        assert re.match(problem, found[0]), found[0]
        with pytest.raises(ConfigError):
            open_model(settings(path))


def test_missing_weights_are_named(folder: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    path = rewritten(folder, tmp_path / "lost")
    tensors = load_file(path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"got none for model\.layers\.1\.mlp\.up_proj\.weight"):
        open_model(settings(path))


def test_every_invalid_setting_is_named(folder: Path) -> None:
    wrong = ModelSettings(
        folder, lora=LoraSettings(r=0, alpha=0, dropout=1, targets=[]), dtype="floa32", quantize="nf5"
    )
    assert [one.partition(":")[0] for one in model_problems(wrong)] == [
        "dtype", "lora.r", "lora.alpha", "lora.dropout", "lora.targets", "quantize"
    ]  # fmt: skip
    assert "did you mean 'float32'" in model_problems(wrong)[0]
    scratch = ModelSettings(folder, from_scratch=True, lora=LoraSettings())
    assert model_problems(scratch) == [
        "lora: Expected none with from_scratch, whose base would never be trained, got adapters."
    ]


@pytest.mark.parametrize(
    ("targets", "problem"),
    [
        (["q_prj"], "got 'q_prj' .did you mean 'q_proj'"),
        (["q_proj", "wq"], "got 'wq'"),
        ("nothing.*", r"Expected names of linear layers, got 'nothing\.\*'"),
        (["mlp"], r"Expected names of linear layers, got \['mlp'\]"),
    ],
)
def test_targets_without_a_layer_are_named(folder: Path, targets: Any, problem: str) -> None:
    (found,) = model_problems(ModelSettings(folder, lora=LoraSettings(targets=targets)))
    assert found.startswith("lora.targets: Expected names of ")
    assert re.search(problem, found), found


def test_what_quantization_needs_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name != "bitsandbytes" or installed is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed

    monkeypatch.setattr("loopwright.recipes.model.checks.version", version)
    installed: str | None = None
    (found,) = model_problems(settings(folder, "nf4"))
    assert "Expected the package bitsandbytes, got none" in found
    installed = "0.43.1"
    (found,) = model_problems(settings(folder, "nf4"))
    assert "Expected bitsandbytes 0.50 or later, got 0.43.1" in found
    installed = "0.50.2"
    assert model_problems(settings(folder, "nf4")) == []
    full = ModelSettings(folder, quantize="nf4", dtype="float64")
    assert [one.partition(":")[0] for one in model_problems(full)] == ["quantize", "dtype"]


def test_a_folder_without_a_tokenizer_is_named(folder: Path, tmp_path: Path) -> None:
    for path in (folder, tmp_path / "absent"):
        with pytest.raises(ConfigError, match="tokenizer: Expected a folder with a tokenizer, got "):
            open_tokenizer(path)


def test_the_configuration_is_that_of_the_folder(folder: Path) -> None:
    assert read_config(settings(folder)).hidden_size == 32


@pytest.mark.parametrize(
    ("kind", "strategy", "problem"),
    [
        ("full", lambda: MeshStrategy(tp=2), None),
        ("full", lambda: MeshStrategy(pp=2), None),
        ("lora", lambda: MeshStrategy(fsdp=2, tp=2), None),
        ("full", lambda: DeepSpeedStrategy(stage=3), None),
        ("nf4", lambda: MeshStrategy(dp=2, fsdp=2), None),
        ("nf4", lambda: MeshStrategy(tp=2), "4-bit weights are not split"),
        ("nf4", lambda: DeepSpeedStrategy(stage=3), "got DeepSpeedStrategy, which converts"),
        ("lora", lambda: MeshStrategy(pp=2), "Expected no pipeline stages"),
        ("dora", lambda: MeshStrategy(tp=-1), "Expected no tp with lora.dora"),
        ("full", lambda: MeshStrategy(cp=2), "packing: Expected false"),
    ],
)
def test_strategies_that_cannot_train_a_model_are_named(
    folder: Path, kind: str, strategy: Any, problem: str | None
) -> None:
    chosen: Strategy = strategy()
    found = strategy_problems(settings(folder, kind), chosen)
    assert len(found) == (problem is not None)
    assert all(problem in one for one in found if problem)


def test_adapters_on_tp_need_a_plan_of_the_model(tmp_path: Path) -> None:
    found = strategy_problems(settings(save_model(tmp_path / "m", "gpt2"), "lora"), MeshStrategy(tp=2))
    assert "Expected a model with a tp_plan" in found[0]


@pytest.mark.parametrize("axis", ["pp", "cp"])
def test_the_loss_of_a_router_needs_ranks_with_all_of_its_logits(tmp_path: Path, axis: str) -> None:
    experts = save_model(tmp_path / "m", "mixtral")
    strategy = MeshStrategy(**{axis: 2})
    (problem,) = strategy_problems(settings(experts), strategy, packing=False)
    assert f"router_aux_loss_coef: Expected 0 with the axis {axis}" in problem
    assert "got 0.5, as config.json asks" in problem
    assert strategy_problems(settings(experts, router_aux_loss_coef=0), strategy, packing=False) == []


def test_the_loss_of_a_router_needs_experts(folder: Path) -> None:
    (problem,) = model_problems(settings(folder, router_aux_loss_coef=0.01))
    assert "router_aux_loss_coef: Expected a model with experts" in problem
    assert "got 0.01 for LlamaForCausalLM" in problem
    (problem,) = model_problems(settings(folder, router_aux_loss_coef=-1))[:1]
    assert "router_aux_loss_coef: Expected at least 0, got -1." in problem


def test_cp_is_allowed_without_packing(folder: Path) -> None:
    assert strategy_problems(settings(folder), MeshStrategy(cp=2), packing=False) == []
