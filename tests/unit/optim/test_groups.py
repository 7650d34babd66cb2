"""Parameter groups by rules: the first match, each parameter once, and rules that match nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import loopwright as lw
from loopwright.optim import group_parameters


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight


def names(module: nn.Module, groups: list[dict[str, Any]]) -> list[list[str]]:
    by_id = {id(one): name for name, one in module.named_parameters()}
    return [[by_id[id(one)] for one in group["params"]] for group in groups]


def test_the_first_rule_that_matches_counts_and_the_others_come_last() -> None:
    net = Net()
    groups = group_parameters(net, [("bias", {"weight_decay": 0.0}), (nn.LayerNorm, {"lr": 0.5}), ("body", {"lr": 2})])
    assert names(net, groups) == [["body.0.bias", "body.1.bias"], ["body.1.weight"], ["body.0.weight"],
                                  ["embedding.weight"]]  # fmt: skip
    assert [{key: value for key, value in group.items() if key != "params"} for group in groups] == [
        {"weight_decay": 0.0}, {"lr": 0.5}, {"lr": 2}, {}
    ]  # fmt: skip
    assert [group["lr"] for group in torch.optim.SGD(groups, lr=1.0).param_groups] == [1.0, 0.5, 2, 1.0]


def test_functions_and_several_classes_are_rules() -> None:
    net = Net()
    rules = [((nn.Embedding, nn.LayerNorm), {"lr": 1}), (lambda name, one: one.ndim == 2, {"lr": 2})]
    groups = group_parameters(net, rules, others={"lr": 3})
    assert names(net, groups) == [["embedding.weight", "body.1.weight", "body.1.bias"], ["body.0.weight"],
                                  ["body.0.bias"]]  # fmt: skip
    assert [group["lr"] for group in groups] == [1, 2, 3]


def test_each_parameter_is_in_one_group_and_tied_ones_too() -> None:
    net = Net()
    groups = group_parameters(net, [("weight", {}), ("head|embedding|body", {})])
    found = [id(one) for group in groups for one in group["params"]]
    assert sorted(found) == sorted(id(one) for one in net.parameters())


def test_a_layer_that_holds_a_tied_parameter_matches_it() -> None:
    net = Net()
    (first, *_) = group_parameters(net, [(lambda name, one: one is net.head.weight, {"name": "head"})])
    assert names(net, [first]) == [["embedding.weight"]]


def test_frozen_parameters_are_left_out_and_their_rules_are_no_mistakes() -> None:
    net = Net()
    net.body.requires_grad_(False)
    assert names(net, group_parameters(net, [("body", {"lr": 1})])) == [["embedding.weight"]]


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        ("nrom", "no parameter of Net matches 'nrom'"),
        (nn.Conv2d, "no parameter of Net matches Conv2d"),
        ((nn.Conv2d, nn.GroupNorm), "no parameter of Net matches Conv2d, GroupNorm"),
        ("(", "is not a regular expression"),
        (3, "a regular expression, a class of modules or a function as rule, got 3"),
        (nn.Linear(1, 1), "a function as rule, got Linear"),
        (("bias", "norm"), r"a function as rule, got \('bias', 'norm'\)"),
    ],
)
def test_a_wrong_rule_is_an_error(rule: Any, text: str) -> None:
    with pytest.raises(lw.ConfigError, match=text):
        group_parameters(Net(), [(rule, {})])


@pytest.mark.parametrize(
    ("rules", "text"),
    [
        ({"bias": {"lr": 1}}, "a list of pairs of a rule and options, got dict"),
        ("bias", "a list of pairs of a rule and options, got str"),
        (["bias"], "pairs of a rule and options such as .*, got 'bias'"),
        ([("bias", 0.0)], "the options of a rule as a dict, got 0.0"),
        ([("bias", {"params": []})], "options without 'params'"),
    ],
)
def test_rules_of_another_form_are_errors(rules: Any, text: str) -> None:
    with pytest.raises(lw.ConfigError, match=text):
        group_parameters(Net(), rules)


def test_a_rule_behind_another_that_takes_everything_is_no_mistake() -> None:
    assert len(group_parameters(Net(), [("", {"lr": 1}), ("bias", {"lr": 2})])) == 1
