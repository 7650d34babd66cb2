"""Optimizers of packages that need full tensors are refused with sharded parameters, before they step."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import loopwright as lw
from loopwright.strategies.fsdp.sharder import Sharder


@pytest.mark.parametrize(
    ("package", "name", "text"),
    [
        ("pytorch_optimizer.optimizer.lars", "LARS", "LARS cannot be used with FSDPStrategy: it copies lists"),
        ("bitsandbytes.optim.adamw", "AdamW8bit", "torchao.optim.AdamW8bit does"),
        ("torch.optim.x", "Adafactor", "Adafactor cannot be used with FSDPStrategy"),
    ],
)
def test_an_optimizer_of_full_tensors_is_refused(package: str, name: str, text: str) -> None:
    kind = type(name, (torch.optim.SGD,), {"__module__": package})
    sharder = lw.FSDPStrategy()._lw_sharder
    assert isinstance(sharder, Sharder)
    with pytest.raises(lw.ConfigError, match=text):
        sharder.replace_parameters(kind(nn.Linear(2, 2).parameters(), lr=0.1))


@pytest.mark.parametrize("package", ["__main__", "torchao.optim.adam"])
def test_a_class_of_the_same_name_elsewhere_is_not(package: str) -> None:
    kind = type("LARS" if package == "__main__" else "AdamW8bit", (torch.optim.SGD,), {"__module__": package})
    lw.FSDPStrategy()._lw_sharder.replace_parameters(kind(nn.Linear(2, 2).parameters(), lr=0.1))
