"""ZeRO in a process that nobody started, and parameters that no optimizer has."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import import_deepspeed, run_ranks
from torch import nn
from torch.utils.data import DataLoader

import loopwright as lw
from loopwright.strategies import DeepSpeedStrategy


class Net(lw.Module):
    """Trains one of two layers, without saying of the other one that it is frozen."""

    def configure_model(self) -> None:
        if not hasattr(self, "net"):
            torch.manual_seed(0)
            self.net, self.out = nn.Linear(4, 4), nn.Linear(4, 1)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.out(self.net(batch)).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.net.parameters(), lr=0.01)


def weights(rank: int, size: int, folder: str, strategy: Any) -> dict[str, torch.Tensor]:
    for name in (
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "LOOPWRIGHT_STORE",
    ):
        if size == 1:
            os.environ.pop(name)
    trainer = lw.Trainer(
        accelerator="cpu", devices=size, strategy=strategy, max_steps=3, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    data = torch.randn(24, 4, generator=torch.Generator().manual_seed(1))
    trainer.fit(Net(), DataLoader(data, batch_size=4 // size))
    assert size > 1 or "LOCAL_RANK" not in os.environ
    trainer.save_checkpoint(f"{folder}/saved.ckpt")
    saved: dict[str, torch.Tensor] = lw.checkpoint.load(f"{folder}/saved.ckpt")["state_dict"]
    return saved


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("size", [1, 2])
def test_parameters_of_no_optimizer_stay_and_are_saved(size: int, stage: int, tmp_path: Path) -> None:
    import_deepspeed()
    found = run_ranks(weights, size, str(tmp_path), DeepSpeedStrategy(stage=stage), connect=False)[0]
    wanted = run_ranks(weights, 1, str(tmp_path), "auto", connect=False)[0]
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)  # added up in another order
