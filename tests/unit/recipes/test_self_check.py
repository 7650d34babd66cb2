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
from loopwright.recipes.self_check import check_packing, compare_packing, without_dropout


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
        check_packing(found)
        return
    with pytest.raises(ConfigError, match="packing=false"):
        check_packing(found)


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
