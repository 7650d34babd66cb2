from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from loopwright.errors import ConfigError
from loopwright.strategies import SingleDeviceStrategy


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        (None, "cpu"),
        ("cpu", "cpu"),
        ("cpu:0", "cpu"),
        (torch.device("meta"), "meta"),
        ("cuda", "cuda:0"),
        ("cuda:1", "cuda:1"),
        ("mps", "mps:0"),
    ],
)
def test_devices_are_named_as_their_tensors_name_them(device: Any, expected: str) -> None:
    strategy = SingleDeviceStrategy(device)
    assert str(strategy.device) == expected
    assert strategy.root_device == strategy.device


@pytest.mark.parametrize("device", ["cqu", [0], "cpu:x"])
def test_a_device_that_torch_does_not_know_is_an_error(device: Any) -> None:
    with pytest.raises(ConfigError, match="Expected a device of torch"):
        SingleDeviceStrategy(device)


def test_a_module_is_moved_and_not_wrapped() -> None:
    module = nn.Linear(2, 2)
    strategy = SingleDeviceStrategy("meta")
    assert strategy.setup_module(module) is module
    assert module.weight.device.type == "meta"
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    assert strategy.setup_optimizer(optimizer) is optimizer


def test_a_module_is_built_on_the_device() -> None:
    with SingleDeviceStrategy("meta").init_context():
        assert nn.Linear(2, 2).weight.device.type == "meta"
    assert nn.Linear(2, 2).weight.device.type == "cpu"


def test_an_empty_module_draws_no_random_numbers() -> None:
    before = torch.get_rng_state()
    with SingleDeviceStrategy("cpu").init_context(empty_init=True):
        nn.Linear(2, 2)
    assert torch.equal(torch.get_rng_state(), before)
