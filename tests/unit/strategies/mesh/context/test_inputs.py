from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from loopwright.errors import ModuleError
from loopwright.strategies.mesh.context.inputs import CallArguments, check_outputs
from loopwright.strategies.mesh.context.parts import SequenceParts

SECOND = SequenceParts(None, 1, 2)  # nothing here communicates


class Model(nn.Module):
    def forward(
        self, input_ids: Tensor, labels: Any = None, position_ids: Any = None, use_cache: bool = True
    ) -> Tensor:
        return input_ids


def split(*args: Any, wanted: Any = None, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    arguments = CallArguments.of(Model(), args, kwargs)
    arguments.split(arguments.dimensions(wanted, "model"), SECOND, "model")
    return arguments.call()


def test_the_first_tensor_is_split_and_positions_are_passed() -> None:
    (tokens,), others = split(torch.arange(8).reshape(1, 8))
    assert tokens.tolist() == [[4, 5, 6, 7]]
    assert others["position_ids"].tolist() == [[4, 5, 6, 7]]
    assert others["use_cache"] is False


def test_positions_that_are_given_are_split() -> None:
    _, others = split(input_ids=torch.zeros(2, 4), position_ids=torch.tensor([[7, 8, 9, 10]]))
    assert others["position_ids"].tolist() == [[9, 10]]


@pytest.mark.parametrize(
    ("arguments", "wanted", "what"),
    [
        ({"input_ids": torch.zeros(2, 5)}, None, "multiple of cp=2 .* got length 5 in input_ids of model"),
        ({"input_ids": torch.zeros(2, 2)}, None, "at least two positions for each part, got length 2"),
        ({"input_ids": torch.zeros(4)}, None, r"got input_ids \(4,\)"),
        ({"input_ids": torch.zeros(2, 4)}, {"tokens": 1}, r"Expected tokens among the arguments .* got input_ids"),
        (
            {"input_ids": torch.zeros(2, 4), "attention_mask": torch.ones(2, 4)}, None,
            r"got cp=2 with an attention mask of shape \(2, 4\)",
        ),
        ({"input_ids": torch.zeros(2, 4), "labels": torch.zeros(2, 4)}, None, r"got labels \(2, 4\) unsplit"),
        (
            {"input_ids": torch.zeros(2, 4), "labels": torch.zeros(2, 6)}, {"input_ids": 1, "labels": 1},
            "got input_ids 4, labels 6",
        ),
    ],
)  # fmt: skip
def test_inputs_that_cannot_be_split_are_named(arguments: dict[str, Any], wanted: Any, what: str) -> None:
    with pytest.raises(ModuleError, match=what):
        split(wanted=wanted, **arguments)


def test_outputs_without_positions_are_named() -> None:
    check_outputs({"logits": torch.zeros(2, 4, 3), "cache": None}, 1, 4, SECOND, "model")
    with pytest.raises(ModuleError, match=r"got output\['loss'\] of shape \(\)"):
        check_outputs({"logits": torch.zeros(2, 4, 3), "loss": torch.zeros(())}, 1, 4, SECOND, "model")
