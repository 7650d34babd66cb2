"""The Trainer reads a loader as a hand-written loop does, whatever else it has to know at an epoch's end."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import loopwright as lw

EPOCHS = 3


def make_loader() -> DataLoader[Any]:
    # A random sampler with a generator of its own draws once more when it is exhausted.
    return DataLoader(torch.arange(10.0), batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(3))


class Net(lw.Module):
    def __init__(self, has_schedule: bool) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))
        self.seen: list[list[float]] = []
        self.has_schedule = has_schedule

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.seen.append(batch.tolist())
        return (self.weight * batch).mean()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return ([optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]) if self.has_schedule else optimizer


@pytest.mark.parametrize("has_schedule", [False, True])
@pytest.mark.parametrize("limit", [{}, {"limit_train_batches": 5}, {"max_steps": 15, "max_epochs": -1}])
def test_every_epoch_has_the_order_of_a_manual_loop(has_schedule: bool, limit: dict[str, int]) -> None:
    loader = make_loader()
    wanted = [batch.tolist() for _ in range(EPOCHS) for batch in loader]
    net = Net(has_schedule)
    trainer = lw.Trainer(
        **{"max_epochs": EPOCHS, **limit}, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(net, make_loader())
    assert net.seen == wanted
