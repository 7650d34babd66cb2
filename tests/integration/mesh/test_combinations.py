"""Sequences, experts, layers and stages shared at once: the same training as on one process, in float64."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from combined_models import SPLIT, TENSOR_PLAN, Sparse, assert_equal, attempt, train
from context_models import Counting, Language, Positioned, Sentences, Summed
from ranks import run_ranks
from torch import Tensor
from torch.utils.data import DataLoader

import loopwright as lw
from loopwright.errors import ModuleError
from loopwright.strategies import MeshStrategy
from loopwright.strategies.mesh.context import Context
from loopwright.strategies.mesh.pipeline import Pipeline

# Any in this file: arguments of strategies, and batches.

ULYSSES, PARTS = Context(method="ulysses"), Context(batch=SPLIT)
BOTH = {"sequence_parallel": True, "loss_parallel": True}
TENSORS = {"tp": 2, "tensor_plan": TENSOR_PLAN}
OF_ATTENTION = {name: style for name, style in TENSOR_PLAN.items() if ".mlp." not in name}
SPARSE_TENSORS = {"tp": 2, "tensor_plan": OF_ATTENTION}
PAIRS = {"pp": 2, "pipeline": Pipeline(schedule="interleaved")}


def size_of(axes: dict[str, Any]) -> int:
    return math.prod(axes.get(name, 1) for name in ("pp", "dp", "fsdp", "cp", "tp"))


@pytest.mark.parametrize(
    ("kind", "axes"),
    [
        (Language, {"cp": 2, **TENSORS, "context": ULYSSES}),
        (Language, {"cp": 2, **TENSORS, **BOTH}),
        (Summed, {"cp": 2, **TENSORS, **BOTH, "context": PARTS}),
        (Language, {"cp": 2, "pp": 2}),
        (Language, {"cp": 2, **PAIRS, "context": ULYSSES}),
        (Summed, {"cp": 2, **PAIRS, "context": PARTS}),
        (Language, {"cp": 2, "pp": 2, **TENSORS}),
    ],
    ids=["tp-ulysses", "tp", "tp-batch", "pp", "pp-ulysses", "pp-batch", "pp-tp"],
)
def test_shared_sequences_beside_other_axes(kind: type[Language], axes: dict[str, Any]) -> None:
    blocks = 4 if "pipeline" in axes else 2
    wanted = train(0, 1, kind, Positioned, {}, blocks=blocks)
    everywhere = run_ranks(train, size_of(axes), kind, Positioned, axes, connect=False, blocks=blocks)
    assert_equal(everywhere, wanted, num_parts=2 if axes.get("context") is PARTS else 1)


@pytest.mark.parametrize(
    "axes",
    [
        {"fsdp": 2, "ep": 2, **SPARSE_TENSORS},
        {"fsdp": 2, "ep": 2, "pp": 2},
        {"fsdp": 2, "ep": 2, "pp": 2, **SPARSE_TENSORS},
    ],
    ids=["tp", "pp", "pp-tp"],
)
def test_shared_experts_beside_other_axes(axes: dict[str, Any]) -> None:
    wanted = train(0, 1, Language, Sparse, {})
    assert_equal(run_ranks(train, size_of(axes), Language, Sparse, axes, connect=False), wanted)


class Balanced(Language):
    """Adds the balance losses of all layers to the loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss + 0.1 * sum(block.mlp.balance_loss for block in self.model.blocks)


class BalancedSums(Summed):
    """Adds them to the sum of losses, which is one of the parts of sequences."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        balance = sum(block.mlp.balance_loss for block in self.model.blocks)
        return lw.Loss(loss.sum + 0.1 * balance * loss.weight, loss.weight)


@pytest.mark.parametrize(
    ("kind", "axes"),
    [
        (Balanced, {"cp": 2}),
        (BalancedSums, {"cp": 2, "context": PARTS}),
        (Language, {"cp": 2, "fsdp": 2, "ep": 2}),
    ],
    ids=["inputs", "batch", "ep"],
)
def test_experts_of_shared_sequences(kind: type[Language], axes: dict[str, Any]) -> None:
    wanted = train(0, 1, kind, Sparse, {})
    everywhere = run_ranks(train, size_of(axes), kind, Sparse, axes, connect=False)
    assert_equal(everywhere, wanted, num_parts=2 if axes.get("context") is PARTS else 1)


class Masked(Positioned):
    """Attends with a mask of its own in front of the blocks."""

    def forward(self, indices: Tensor, position_ids: Tensor | None = None) -> Tensor:
        length = indices.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool).tril()
        x = self.tok(indices)[:, None]
        F.scaled_dot_product_attention(x, x, x, attn_mask=mask)
        return super().forward(indices, position_ids)


class Averaging(Positioned):
    """Subtracts the mean over the sequence after the blocks."""

    def forward(self, indices: Tensor, position_ids: Tensor | None = None) -> Tensor:
        logits = super().forward(indices, position_ids)
        return logits - logits.mean(1, keepdim=True)


POSITIONS = "got queries that differ by .*, keys that differ by .* in attention 0 of"
HEADS = r"got 1 heads and 1 heads of keys and values on each rank of tp=2 in the shape \(4, 1, 4, 8\)"

# What is trained, on which axes, and what the error says.
FAULTS: dict[str, tuple[type[Language], type[Positioned], dict[str, Any], str]] = {
    "tp-positions": (Language, Counting, {"cp": 2, **TENSORS}, POSITIONS),
    "tp-mask": (Language, Masked, {"cp": 2, **TENSORS}, r"got cp=2 with an attention mask of shape \(4, 4\)"),
    "tp-heads": (Language, Positioned, {"cp": 2, **TENSORS, "context": ULYSSES}, HEADS),
    "pp-positions": (Language, Counting, {"cp": 2, "pp": 2}, POSITIONS),
    "pp-mask": (Language, Masked, {"cp": 2, "pp": 2}, r"got cp=2 with an attention mask of shape \(4, 4\)"),
    "pp-mean": (Language, Averaging, {"cp": 2, "pp": 2}, "got output 0 that differs by .*, with equal attention"),
    "pp-plain-loss": (Language, Positioned, {"cp": 2, "pp": 2, "context": PARTS}, r"lw.Loss\(sum, weight\) .* got Te"),
    "pp-balance": (
        Balanced, Sparse, {"fsdp": 2, "ep": 2, "pp": 2},
        r"read model.blocks.0.mlp.balance_loss \(\w+\), which stage 0 .* train without pp to add balance losses",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_named(name: str) -> None:
    kind, model, axes, text = FAULTS[name]
    options = {"heads": 2} if name == "tp-heads" else {}
    answers = run_ranks(attempt, size_of(axes), kind, model, axes, connect=False, **options)
    assert "no error" not in answers
    assert any(re.search(text, answer, re.DOTALL) for answer in answers), answers


def fit_twice(rank: int, size: int) -> str:
    module = Language(Sparse())
    for ep in (2, 4):
        trainer = lw.Trainer(
            accelerator="cpu", strategy=MeshStrategy(fsdp=4, ep=ep), devices=4, max_steps=1, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        try:
            trainer.fit(module, DataLoader(Sentences(4)), DataLoader(Sentences(4)))
        except ModuleError as error:
            return str(error)
    return "no error"


def test_a_second_fit_with_other_experts_on_each_rank_is_refused() -> None:
    for answer in run_ranks(fit_twice, 4, connect=False):
        assert "Expected Language to have the layout ep=4, but it already has ep=2 of an earlier run" in answer
