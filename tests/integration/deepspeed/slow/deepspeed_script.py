"""A user's script, started by test_deepspeed_runs.py: trains two steps more than the last run, from its checkpoint."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from conformance import Net, global_batch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import loopwright as lw
from loopwright.callbacks import ModelCheckpoint
from loopwright.strategies import DeepSpeedStrategy


class Trained(lw.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.first = -1

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.first < 0:
            self.first = self.trainer.global_step
        if os.environ.get("FAILS") == str(self.trainer.global_rank):
            raise ValueError("the weather is bad")
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def on_train_end(self) -> None:
        self.trainer.print(f"steps {self.trainer.global_step}, from {self.first}")

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.02)


def main() -> None:
    folder, start = Path(sys.argv[1]), sys.argv[2]
    trainer = lw.Trainer(
        accelerator="cpu", strategy=DeepSpeedStrategy(stage=2, start_method=start), devices=2, logger=False,
        max_steps=int(os.environ["STEPS"]), callbacks=[ModelCheckpoint(folder, save_last=True)],
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    batches = [global_batch(number) for number in range(2)]
    loader = DataLoader(TensorDataset(*map(torch.cat, zip(*batches, strict=True))), batch_size=6)
    trainer.fit(Trained(), loader, ckpt_path="last")


if __name__ == "__main__":
    main()
