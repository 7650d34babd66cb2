"""Parameters that a step does not use are left alone, as on one process, unless another rank's step uses them."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import loopwright as lw
from loopwright.strategies import FSDPStrategy, MeshStrategy

# Any in this file: batches, strategies, and what configure_optimizers returns.

STEPS = 11


class Body(nn.Module):
    """A unit with a parameter that only some of its calls use."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 6, dtype=torch.float64)
        self.shift = nn.Parameter(torch.ones(6, dtype=torch.float64))

    def forward(self, x: Tensor, *, shifts: bool) -> Tensor:
        hidden: Tensor = self.layer(x).tanh()
        return hidden + self.shift if shifts else hidden


class Heads(lw.Module):
    """Uses its second head, and a bias of one element, in some steps only; a third one never.

    Args:
        used: "alternating", "twice": also, and the body has a part that one of its two calls uses; "until 6": in the
            first six steps; "own": for samples of which the first is marked.
    """

    def __init__(self, used: str) -> None:
        super().__init__()
        self.used = used
        self.first = nn.Linear(4, 4, dtype=torch.float64)  # so that a backward pass ends in the body twice
        self.body = Body()
        self.heads = nn.ModuleList(nn.Linear(6, 1, dtype=torch.float64) for _ in range(3))

    def uses_second(self, marks: Tensor, batch_idx: int) -> bool:
        if self.used == "own":
            return bool(marks[0])
        return batch_idx < 6 if self.used == "until 6" else batch_idx % 2 == 0

    def training_step(self, batch: Any, batch_idx: int) -> lw.Loss:
        x, marks = batch
        x = self.first(x)
        hidden = self.body(x, shifts=self.used == "until 6" or batch_idx % 3 == 0)
        if self.used == "twice":
            hidden = hidden + self.body(x, shifts=batch_idx % 3 == 1)
        out = self.heads[0](hidden)
        if self.uses_second(marks, batch_idx):
            out = out + self.heads[1](hidden) * marks[:, None]
        return lw.Loss(out.square().sum(), len(x))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.05, weight_decay=0.3)


def data(used: str) -> TensorDataset:
    """Return samples with marks; with "own", each second one, which one of two ranks reads, has none."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4 * STEPS, 4, generator=generator, dtype=torch.float64)
    marks = torch.ones(len(x), dtype=torch.float64)
    if used == "own":
        marks[2::4] = marks[3::4] = 0.0
    return TensorDataset(x, marks)


def train(rank: int, size: int, used: str, strategy: str) -> tuple[dict[str, Tensor], list[str]]:
    """Train, and return the weights and what was warned of."""
    warned: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warned.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("loopwright").addHandler(handler)
    lw.seed_everything(3, verbose=False)
    module = Heads(used)
    arguments: dict[str, Any] = {}
    if size > 1:
        chosen = FSDPStrategy(auto_wrap_policy={nn.Linear, Body}) if strategy == "fsdp" else MeshStrategy(fsdp=size)
        arguments = {"strategy": chosen, "devices": size}
    trainer = lw.Trainer(
        accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, **arguments,
    )  # fmt: skip
    trainer.fit(module, DataLoader(data(used), batch_size=4 // size))
    trained = trainer.fabric.strategy.module_state_dict(trainer.model)
    full = {name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in trained.items()}
    return full, [one for one in warned if "does not reach" in one]


# With "own", both heads belong to one unit: units must be run by all ranks.
@pytest.mark.parametrize(("used", "strategy"), [("alternating", "fsdp"), ("alternating", "mesh"), ("own", "mesh"),
                                                  ("twice", "fsdp"), ("twice", "mesh")])  # fmt: skip
def test_what_no_rank_uses_is_not_stepped(used: str, strategy: str) -> None:
    expected, _ = train(0, 1, used, strategy)
    results = run_ranks(train, 2, used, strategy, connect=False)
    for weights, warned in results:
        assert not warned
        for name, value in expected.items():
            # float64; gradients are sums over ranks, in another order.
            assert torch.allclose(weights[name], value, rtol=0, atol=1e-12), name


def test_a_parameter_that_is_left_out_later_is_named_until_the_ranks_compare() -> None:
    lw.seed_everything(3, verbose=False)
    initial = Heads("until 6").state_dict()
    expected, _ = train(0, 1, "until 6", "fsdp")
    for weights, warned in run_ranks(train, 2, "until 6", "fsdp", connect=False):
        assert len(warned) == 1
        assert "backward pass 7 is the first" in warned[0]
        assert "heads.1.weight, heads.1.bias. Until the ranks compare notes, after pass 8" in warned[0]
        assert torch.equal(weights["heads.2.weight"], initial["heads.2.weight"])  # never used
        assert not torch.equal(weights["heads.1.weight"], expected["heads.1.weight"])  # of the one step, pass 7
