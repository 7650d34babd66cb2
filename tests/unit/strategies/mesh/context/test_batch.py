from __future__ import annotations

from typing import Any

import pytest
import torch

import loopwright as lw
from loopwright.errors import ModuleError
from loopwright.strategies.mesh.context.batch import split_batch, whole_loss
from loopwright.strategies.mesh.context.parts import SequenceParts

SECOND = SequenceParts(None, 1, 2)  # nothing here communicates
TOKENS = torch.arange(8).reshape(2, 4)


def test_dicts_and_tuples_are_split() -> None:
    batch, whole, length = split_batch({"x": TOKENS, "name": "a"}, {"x": 1}, SECOND)
    assert (batch["x"].tolist(), batch["name"], length) == ([[2, 3], [6, 7]], "a", 2)
    assert whole is TOKENS
    assert split_batch((TOKENS, 3), {0: 1}, SECOND)[0][0].tolist() == [[2, 3], [6, 7]]


@pytest.mark.parametrize(
    ("batch", "dimensions", "what"),
    [
        ({"x": TOKENS}, {"y": 1}, r"tensors at 'y', .* got a dict with 'x' a tensor of shape \(2, 4\)"),
        (TOKENS, {0: 1}, r"tensors at 0, .* got a tensor of shape \(2, 4\)"),
        ((TOKENS,), {0: 2}, "tensors at 0"),
        ({"x": TOKENS, "y": TOKENS[:, 1:]}, {"x": 1, "y": 1}, "got 'x' 4, 'y' 3"),
        ({"x": TOKENS, "mask": TOKENS}, {"x": 1}, "got 'mask' unsplit"),
        ({"x": TOKENS[:, 1:]}, {"x": 1}, "multiple of cp=2 .* got length 3 in 'x' of the batch"),
    ],
)
def test_batches_that_cannot_be_split_are_named(batch: Any, dimensions: Any, what: str) -> None:
    with pytest.raises(ModuleError, match=what):
        split_batch(batch, dimensions, SECOND)


@pytest.mark.parametrize("output", [torch.ones(()), {"loss": torch.ones(())}, None])
def test_a_loss_without_a_weight_is_refused(output: Any) -> None:
    with pytest.raises(ModuleError, match=r"Expected lw.Loss\(sum, weight\) from training_step"):
        whole_loss(output, SECOND)


class TwoAlike(SequenceParts):
    """Two ranks with the same values."""

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        return 2 * tensor


@pytest.mark.parametrize("form", ["Loss", "keys", "nested"])
def test_sums_and_weights_of_parts_are_added(form: str) -> None:
    loss = lw.Loss(torch.tensor(3.0, requires_grad=True), 5)
    outputs: dict[str, Any] = {
        "Loss": loss, "keys": {"loss_sum": loss.sum, "weight": loss.weight}, "nested": {"loss": loss, "other": 1}
    }  # fmt: skip
    found: Any = whole_loss(outputs[form], TwoAlike(None, 0, 2))
    total, weight = (found["loss_sum"], found["weight"]) if form == "keys" else (None, None)
    if form != "keys":
        read = found if form == "Loss" else found["loss"]
        total, weight = read.sum, read.weight
    assert (float(total.detach()), float(weight), total.dtype) == (6.0, 10.0, torch.float32)
    assert total.requires_grad
