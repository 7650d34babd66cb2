from __future__ import annotations

import torch
from torch import nn

from loopwright.strategies.skip_init import SkipInit


def test_parameters_are_not_filled_and_no_random_number_is_drawn() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    with SkipInit():
        module = nn.Sequential(nn.Linear(4, 4), nn.Conv2d(3, 3, 3))
        nn.init.normal_(module[0].weight)
        nn.init.uniform_(tensor=module[0].weight)
    assert torch.equal(torch.get_rng_state(), before)
    assert module[0].weight.shape == (4, 4)
    assert module[0].weight.requires_grad


def test_other_functions_are_called() -> None:
    with SkipInit():
        assert torch.ones(2).sum().item() == 2
        norm = nn.BatchNorm1d(2)
    assert torch.equal(norm.running_var, torch.ones(2))
