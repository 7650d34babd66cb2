"""Packed samples in small models of several families: apart as they must be, and the wrong forms found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from recipe_models import FAMILIES, batch, config, save_model, settings
from torch import Tensor

from loopwright import ConfigError
from loopwright.recipes.model.loading import open_model
from loopwright.recipes.self_check import Packing, check_packing, compare_packing, has_experts, without_dropout


def forward_of(model: Any, **changes: Any) -> Any:
    def forward(ids: Tensor, positions: Tensor) -> Tensor:
        given = {"input_ids": ids, "position_ids": positions, "use_cache": False}
        given |= {name: make(ids) if callable(make) else make for name, make in changes.items()}
        logits: Tensor = model(**given).logits
        return logits

    return forward


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_samples_are_those_apart(tmp_path: Path, family: str) -> None:
    model = open_model(settings(save_model(tmp_path / "m", family))).eval()
    found = compare_packing(forward_of(model), batch()["input_ids"])
    assert found.first <= 1e-6
    assert found.others <= 1e-6
    check_packing(found)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("wrong", ["cache", "mask"])
def test_wrong_forms_are_found(tmp_path: Path, family: str, wrong: str) -> None:
    model = open_model(settings(save_model(tmp_path / "m", family))).eval()
    forms: dict[str, Any] = {"cache": {"use_cache": True}, "mask": {"attention_mask": torch.ones_like}}
    found = compare_packing(forward_of(model, **forms[wrong]), batch()["input_ids"])
    assert found.others > 0.02
    with pytest.raises(ConfigError, match="packing=false"):
        check_packing(found)


@pytest.mark.parametrize("wrong", [{}, {"use_cache": True}])
def test_sixteen_bits_do_not_hide_it(tmp_path: Path, wrong: dict[str, Any]) -> None:
    folder = save_model(tmp_path / "m", "llama", num_hidden_layers=8)
    model = open_model(settings(folder, dtype="bfloat16")).eval()
    found = compare_packing(forward_of(model, **wrong), batch(length=48)["input_ids"])
    if not wrong:
        check_packing(found, dtype=torch.bfloat16)
        return
    with pytest.raises(ConfigError, match="packing=false"):
        check_packing(found, dtype=torch.bfloat16)


def test_rounding_to_16_bits_is_no_influence_where_the_first_sample_has_none() -> None:
    check_packing(Packing(0.0, 2**-8), dtype=torch.bfloat16)
    with pytest.raises(ConfigError, match="packing=false"):
        check_packing(Packing(0.0, 2**-8))
    with pytest.raises(ConfigError, match="packing=false"):
        check_packing(Packing(0.0, 2**-8, after=1e-5), dtype=torch.bfloat16)


def test_tokens_that_see_later_ones_are_found() -> None:
    from transformers import BertConfig, BertLMHeadModel

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = BertLMHeadModel(BertConfig(vocab_size=96, **sizes)).eval()
    with torch.no_grad():
        for one in model.parameters():
            one.add_(torch.randn(one.shape) * 0.2)
    with pytest.raises(ConfigError, match="depends on earlier ones only"):
        check_packing(compare_packing(forward_of(model), batch()["input_ids"]))


def untrained(config: Any, dtype: torch.dtype) -> Any:
    """Return a model as a pretraining begins with it, in which the influence of another token is small."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).to(dtype).eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_later_tokens_are_found_at_initial_values(dtype: torch.dtype) -> None:
    from transformers import BertConfig

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = untrained(BertConfig(vocab_size=96, **sizes), dtype)
    with pytest.raises(ConfigError, match="depends on earlier ones only"):
        check_packing(compare_packing(forward_of(model), batch()["input_ids"]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_state_that_passes_over_samples_is_found_at_initial_values(dtype: torch.dtype) -> None:
    from transformers import JambaConfig

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = untrained(JambaConfig(vocab_size=96, num_key_value_heads=2, use_mamba_kernels=False, **sizes), dtype)
    found = compare_packing(forward_of(model), batch(length=48)["input_ids"])
    assert found.others < 1e-3  # too little to be told from rounding
    with pytest.raises(ConfigError, match="packing=false"):
        check_packing(found, has_experts=has_experts(model))


def test_experts_may_round_by_their_tokens(tmp_path: Path) -> None:
    from transformers import MixtralConfig

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = untrained(MixtralConfig(vocab_size=96, num_key_value_heads=2, **sizes), torch.bfloat16)
    assert has_experts(model)
    assert not has_experts(open_model(settings(save_model(tmp_path / "m"))))
    check_packing(compare_packing(forward_of(model), batch(length=48)["input_ids"]), has_experts=True)
    check_packing(Packing(0.01, 0.02, before=0.01, after=0.02), has_experts=True)
    with pytest.raises(ConfigError, match="depends on earlier ones only"):
        check_packing(Packing(0.01, 0.02, before=0.01, after=0.02))


def test_a_row_of_one_repeated_token_is_changed() -> None:
    ids = torch.zeros(2, 9, dtype=torch.int64)
    seen: list[Tensor] = []
    compare_packing(lambda given, positions: seen.append(given) or torch.ones(*given.shape, 4), ids)
    assert not (seen[-1][:, 3:6] == 0).any()
    assert not seen[-1][:, [0, 1, 2, 6, 7, 8]].any()


@pytest.mark.parametrize("length", [2, 5, 7])
def test_short_rows_are_compared_too(tmp_path: Path, length: int) -> None:
    model = open_model(settings(save_model(tmp_path / "m"))).eval()
    ids = batch()["input_ids"][:, :length]
    check_packing(compare_packing(forward_of(model), ids))
    assert compare_packing(forward_of(model, use_cache=True), ids).others > 1e-3


@pytest.mark.parametrize("family", FAMILIES)
def test_padding_changes_nothing(tmp_path: Path, family: str) -> None:
    model = open_model(settings(save_model(tmp_path / "m", family))).eval()
    forward = forward_of(model)
    given = batch(2, length=18)
    ids, positions = given["input_ids"], given["position_ids"]
    used = int((given["labels"][0] != -100).nonzero().max()) + 2
    with torch.no_grad():
        full, own = forward(ids, positions)[0, :used], forward(ids[:1, :used], positions[:1, :used])[0]
    torch.testing.assert_close(full, own, rtol=0, atol=2e-5)


def test_modes_of_submodules_are_put_back() -> None:
    module = torch.nn.Sequential(torch.nn.Dropout(), torch.nn.Dropout().eval())
    with without_dropout(module):
        assert not any(one.training for one in module.modules())
    assert [one.training for one in module.modules()] == [True, True, False]


def test_all_families_have_a_configuration() -> None:
    assert len({type(config(family)) for family in FAMILIES}) == len(FAMILIES)
