"""Trainings of a tiny model by the recipes: the folders that they need, and their weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from recipe_models import save_model
from recipe_texts import chat, small_tokenizer, write_jsonl
from torch import Tensor

import loopwright as lw
from loopwright.checkpoint import storage
from loopwright.recipes.module import RecipeModule
from loopwright.recipes.settings import FinetuneSettings

# Any in this file: settings.

VOCAB = 400
QUIET = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}


def make_inputs(folder: Path, chats: int = 24) -> Path:
    """Save a model with its tokenizer, and chats; return their folder."""
    model = save_model(folder / "base", vocab_size=VOCAB)
    small_tokenizer().save_pretrained(str(model))
    write_jsonl(folder / "chats.jsonl", (chat(number) for number in range(chats)))
    return folder


def settings(inputs: Path, out: Path, **changes: Any) -> FinetuneSettings:
    """Return settings of a training of one epoch in float32 on the CPU; `trainer` is added to what is quiet."""
    trainer = {**QUIET, "accelerator": "cpu", **changes.pop("trainer", {})}
    given = {"model": inputs / "base", "data": str(inputs / "chats.jsonl"), "max_length": 128, "eps": 1e-4}
    # With AdamW's usual eps the first steps have the size of the learning rate whatever the gradient: they would
    # enlarge rounding errors of gradients near 0.
    return FinetuneSettings(**{**given, "out": out, "devices": 1, "trainer": trainer, **changes})


def weights(run: Path, name: str = "last.ckpt") -> dict[str, Tensor]:
    """Return the weights in a checkpoint of a run."""
    found: dict[str, Tensor] = storage.load(run / "checkpoints" / name)["state_dict"]
    return found


def largest_difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Return the largest difference of two sets of weights with equal names."""
    assert list(one) == list(other)
    return max(float((one[name].double() - other[name].double()).abs().max()) for name in one)


def same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Return whether two sets of weights are equal."""
    return list(one) == list(other) and all(torch.equal(one[name], other[name]) for name in one)


def poison(patch: pytest.MonkeyPatch, words: str) -> None:
    """Let the loss of rows with these words be NaN."""
    tokenizer, step = small_tokenizer(), RecipeModule.training_step

    def training_step(self: RecipeModule, batch: Any, batch_idx: int) -> lw.Loss:
        loss = step(self, batch, batch_idx)
        is_poisoned = any(words in tokenizer.decode(row.tolist()) for row in batch["input_ids"])
        return lw.Loss(loss.sum * float("nan"), loss.weight) if is_poisoned else loss

    patch.setattr(RecipeModule, "training_step", training_step)
