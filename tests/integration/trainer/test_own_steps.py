"""A module on several ranks that steps an optimizer of its own, or one that it returned, without the trainer's help."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from ranks import run_ranks
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import loopwright as lw


class Owning(lw.Module):
    def __init__(self, *, automatic: bool, returns: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.automatic_optimization = automatic
        self.returns = returns
        self.layer = nn.Linear(4, 1, dtype=torch.float64)
        self.own = torch.optim.SGD(self.layer.parameters(), lr=0.05, momentum=0.9)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = nn.functional.mse_loss(self.layer(batch[0]), batch[1])
        self.log("loss", loss, sync_dist=True)
        self.own.zero_grad()
        loss.backward()
        self.own.step()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("error", 1.0)

    def configure_optimizers(self) -> Any:
        return self.own if self.returns else None


CASES = [(True, False), (False, False), (False, True)]


def train(rank: int, size: int, folder: str) -> list[Any]:
    warnings.simplefilter("ignore")  # configure_optimizers returned None
    x = torch.randn(16, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, x.sum(1, keepdim=True))
    results = []
    for number, (automatic, returns) in enumerate(CASES):
        save = lw.ModelCheckpoint(f"{folder}/{size}-{number}", "{step}", monitor="error", save_top_k=-1)
        trainer = lw.Trainer(
            accelerator="cpu", devices=size, strategy="ddp" if size > 1 else "auto", logger=False, max_epochs=9,
            callbacks=[lw.EarlyStopping("error", patience=1), save], enable_progress_bar=False,
            enable_model_summary=False, log_every_n_steps=2, val_check_interval=2, precision="64-true",
        )  # fmt: skip
        net = Owning(automatic=automatic, returns=returns)
        trainer.fit(net, DataLoader(data, batch_size=4 // size), DataLoader(data, batch_size=4))
        state = {name: value.clone() for name, value in net.state_dict().items()}
        results.append((trainer.global_step, len(save.best_k_models), sorted(trainer.logged_metrics), state))
    return results


def test_two_ranks_count_save_stop_and_train_as_one_process(tmp_path: Path) -> None:
    [alone] = run_ranks(train, 1, str(tmp_path), connect=False)
    for of_rank in run_ranks(train, 2, str(tmp_path), connect=False):
        for (steps, saved, logged, state), wanted in zip(of_rank, alone, strict=True):
            assert (steps, saved, logged) == wanted[:3] == (4, 2, ["epoch", "error", "loss"])
            for name, value in state.items():  # the mean over ranks adds in another order
                torch.testing.assert_close(value, wanted[3][name], rtol=1e-12, atol=1e-12)
