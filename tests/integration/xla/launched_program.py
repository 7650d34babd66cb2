"""A script as a user writes it, with a process for each device: `launched_program.py METHOD FOLDER [EPOCHS] [fail]`."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from conformance import SAMPLES, TrainedNet, global_batch
from torch.utils.data import DataLoader, TensorDataset

import loopwright as lw
from loopwright.strategies import XLAReplicasStrategy


class Net(TrainedNet):
    """Fails on rank 1, if the script is asked to."""

    def on_train_batch_start(self, batch: object, batch_idx: int) -> None:
        if "fail" in sys.argv and self.global_rank == 1:
            raise ValueError("rank 1 does not like this batch")


def main() -> None:
    method, folder, epochs = sys.argv[1:4]
    is_alone = method == "alone"  # one process without XLA, with the batches of both ranks
    batch_size = SAMPLES // 2 if is_alone else SAMPLES // 4
    loader = DataLoader(TensorDataset(*global_batch(0)), batch_size=batch_size)
    trainer = lw.Trainer(
        accelerator="cpu" if is_alone else "xla",
        strategy="auto" if is_alone else XLAReplicasStrategy(start_method=method),
        devices=1 if is_alone else 2, max_epochs=int(epochs), default_root_dir=folder, enable_progress_bar=False,
        enable_model_summary=False, logger=False, callbacks=[lw.ModelCheckpoint(folder, save_last=True)],
    )  # fmt: skip
    module = Net("adamw")
    trainer.fit(module, loader, ckpt_path="last")
    if trainer.is_global_zero:
        torch.save({name: value.cpu() for name, value in module.net.state_dict().items()}, Path(folder, "weights.pt"))


if __name__ == "__main__":
    main()
