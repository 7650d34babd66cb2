"""The plan of rows, and packed rows against their samples apart on models of transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from recipe_texts import chat, small_tokenizer, write_jsonl
from torch import Tensor
from torch.nn import functional as F

from loopwright.recipes.data import DataSettings, RecipeData
from loopwright.recipes.data.packing import pack


@pytest.mark.parametrize("seed", [0, 1])
def test_every_piece_is_in_one_row_and_no_row_is_too_long(seed: int) -> None:
    lengths = np.random.default_rng(seed).integers(1, 101, 2_000)
    plan = pack(lengths, 100, seed)
    assert sorted(plan.members.tolist()) == list(range(2_000))
    sums = [int(lengths[plan.row(row)].sum()) for row in range(len(plan))]
    assert max(sums) <= 100
    assert min(sums) > 0


def test_rows_are_those_of_a_search_through_all_rows() -> None:
    lengths = np.random.default_rng(3).integers(1, 60, 300)
    plan = pack(lengths, 64, seed=4)
    spaces: list[int] = []
    for length in sorted(lengths.tolist(), reverse=True):
        fitting = [(space, row) for row, space in enumerate(spaces) if space >= length]
        if fitting:
            spaces[min(fitting)[1]] -= length
        else:
            spaces.append(64 - length)
    planned = sorted(64 - int(lengths[plan.row(row)].sum()) for row in range(len(plan)))
    assert planned == sorted(spaces)


def test_a_seed_decides_which_pieces_of_one_length_share_a_row() -> None:
    lengths = np.full(200, 10)
    plans = [pack(lengths, 50, seed).members.tolist() for seed in (0, 0, 1)]
    assert plans[0] == plans[1]
    assert plans[0] != plans[2]


def small_model(family: str) -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    sizes = {
        "vocab_size": 400,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": 0,
    }
    torch.manual_seed(0)
    model = (
        LlamaForCausalLM(LlamaConfig(**sizes))
        if family == "llama"
        else Qwen3ForCausalLM(Qwen3Config(head_dim=8, **sizes))
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)  # attention that matters: with small weights all positions are alike
    return model.double().eval()


def packed_row(folder: Path) -> dict[str, Tensor]:
    path = write_jsonl(folder / "a.jsonl", [chat(number) for number in range(8)])
    data = RecipeData(DataSettings(path, max_length=200), small_tokenizer(), folder / "cache")
    data.prepare_data()
    data.setup("fit")
    return next(batch for batch in data.train_dataloader() if batch["position_ids"].eq(0).sum() > 2)


def outputs(model: torch.nn.Module, batch: dict[str, Tensor], **options: object) -> tuple[Tensor, Tensor]:
    """Return the last hidden states, and the sum of the loss."""
    given = {name: batch[name] for name in ("input_ids", "position_ids")}
    out = model(**given, output_hidden_states=True, **options)
    loss = F.cross_entropy(out.logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum", ignore_index=-100)
    return out.hidden_states[-1][0], loss


def apart(model: torch.nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the same for each sample by itself, from its tokens alone."""
    starts = batch["position_ids"][0].eq(0).nonzero().flatten().tolist()
    hidden, loss = [], torch.zeros((), dtype=torch.float64)
    for first, end in zip(starts, [*starts[1:], batch["input_ids"].shape[1]], strict=True):
        out = model(input_ids=batch["input_ids"][:, first:end], output_hidden_states=True, use_cache=False)
        hidden.append(out.hidden_states[-1][0])
        logits, labels = out.logits[0], batch["labels"][0, first:end]
        loss = loss - sum(logits.log_softmax(-1)[at, label] for at, label in enumerate(labels.tolist()) if label >= 0)
    return torch.cat(hidden), loss


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@torch.no_grad()
def test_a_packed_row_gives_what_its_samples_give_apart(tmp_path: Path, family: str) -> None:
    model, batch = small_model(family), packed_row(tmp_path)
    hidden, loss = outputs(model, batch, use_cache=False)
    expected, expected_loss = apart(model, batch)
    torch.testing.assert_close(hidden, expected, rtol=0, atol=1e-12)
    # Logits of Llama pass through a norm that rounds to float32 on the way.
    torch.testing.assert_close(loss, expected_loss, rtol=1e-9, atol=0)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("wrong", ["cache", "mask"])
@torch.no_grad()
def test_a_cache_or_a_mask_of_ones_mixes_samples(tmp_path: Path, family: str, wrong: str) -> None:
    model, batch = small_model(family), packed_row(tmp_path)
    mask = torch.ones_like(batch["input_ids"])
    options = {"use_cache": True} if wrong == "cache" else {"use_cache": False, "attention_mask": mask}
    hidden, _ = outputs(model, batch, **options)
    expected, _ = apart(model, batch)
    assert (hidden - expected).abs().max() > 0.01
