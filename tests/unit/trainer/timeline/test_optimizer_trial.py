from __future__ import annotations

import torch
from torch import nn

from loopwright.trainer.timeline import optimizer_trial
from loopwright.trainer.timeline.optimizer_trial import try_fused


def test_the_trial_is_of_the_largest_optimizer_and_in_proportion() -> None:
    small, large = nn.Linear(2, 2), nn.Linear(2048, 2048)
    optimizers = [torch.optim.SGD(small.parameters(), lr=0.1, momentum=0.9), torch.optim.Adam(large.parameters())]
    sample, factor = optimizer_trial._sample(optimizers[1])
    assert sum(one.numel() for _, one in sample) <= 2**20
    assert factor * sum(one.numel() for _, one in sample) == sum(one.numel() for one in large.parameters())
    trial = try_fused(optimizers)
    assert trial is not None
    assert trial.name == "Adam"
    assert min(trial.present_s, trial.fused_s) > 0
    assert not optimizers[1].state


def test_one_tensor_that_is_too_large_is_tried_in_part() -> None:
    sample, factor = optimizer_trial._sample(torch.optim.AdamW([nn.Parameter(torch.zeros(2**21))]))
    assert [one.numel() for _, one in sample] == [2**20]
    assert factor == 2


def test_groups_stay_groups_and_options_are_those_of_the_optimizer() -> None:
    layer = nn.Linear(4, 4)
    groups = [{"params": [layer.weight], "weight_decay": 0.1}, {"params": [layer.bias], "weight_decay": 0.0}]
    sample, _ = optimizer_trial._sample(torch.optim.AdamW(groups, amsgrad=True))
    merged = optimizer_trial._merged([{**group, "params": [one]} for group, one in sample * 2])
    assert [group["weight_decay"] for group in merged] == [0.1, 0.0, 0.1, 0.0]
    assert all(group["amsgrad"] for group in merged)


def test_what_cannot_be_fused_is_not_tried() -> None:
    layer = nn.Linear(2, 2)
    assert try_fused([]) is None
    assert try_fused([torch.optim.RMSprop(layer.parameters()), torch.optim.SGD(layer.parameters(), fused=True)]) is None
