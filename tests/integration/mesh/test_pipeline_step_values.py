"""Step values in `callback_metrics` of all pipeline stages: at log boundaries, and at the end of an epoch."""

from __future__ import annotations

from typing import Any, cast

import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import loopwright as lw
from loopwright.strategies import MeshStrategy

# Any in this file: batches, and results that travel between processes.

WIDTH = 4
NAMES = ("alone", "both_step", "joined")


class Net(lw.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0]
        for block in self.blocks:
            x = block(x)
        loss = cast(Tensor, x.square().mean())
        self.log("alone", loss)
        self.log("both", loss, on_step=True, on_epoch=True)
        self.log("joined", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Seen(lw.Callback):
    """What callbacks read before each batch and at the end of an epoch."""

    def __init__(self) -> None:
        self.rows: list[dict[str, tuple[float, int]]] = []

    def _read(self, trainer: Any) -> None:
        metrics = trainer.callback_metrics
        self.rows.append({n: (float(metrics[n]), trainer.metric_step(n)) for n in (*NAMES, "both") if n in metrics})

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self._read(trainer)

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self._read(trainer)


def fit(rank: int, size: int) -> list[dict[str, tuple[float, int]]]:
    lw.seed_everything(1, verbose=False)
    seen = Seen()
    trainer = lw.Trainer(
        accelerator="cpu", strategy=MeshStrategy(pp=2), devices=size, max_epochs=2, logger=False, log_every_n_steps=2,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, callbacks=[seen],
    )  # fmt: skip
    data = torch.randn(10, WIDTH, generator=torch.Generator().manual_seed(1))
    trainer.fit(Net(), DataLoader(TensorDataset(data), batch_size=2))
    return seen.rows


def test_stages_before_the_last_have_the_values_of_the_latest_log_boundary_and_of_the_end_of_an_epoch() -> None:
    first, last = run_ranks(fit, 2, connect=False)
    assert len(first) == len(last) == 2 * (5 + 1)
    assert first[0] == {}
    for epoch in range(2):
        for batch in range(6):
            row, count = 6 * epoch + batch, 5 * epoch + batch  # steps that are done
            boundary = max(count // 2 * 2, 5 * epoch)
            is_end = batch == 5
            for name in NAMES:
                if is_end or (boundary == count and count):
                    assert first[row][name] == last[row][name], (row, name)
                elif boundary:
                    assert first[row][name][1] == boundary, (row, name)
        assert first[6 * epoch + 5]["both"] == last[6 * epoch + 5]["both"]
