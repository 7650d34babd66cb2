"""Two processes that torchrun started, or that the strategy starts: rank 0 prints what both have."""

import json
import sys

import lightning as L
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Model(BoringModel):
    """Logs over ranks."""

    def training_step(self, batch, batch_idx):
        loss = self.step(batch[0])
        self.log("loss", loss, sync_dist=True, on_epoch=True)
        self.log("ranks", float(self.global_rank), reduce_fx="sum", sync_dist=True, on_step=False, on_epoch=True)
        return loss

    def train_dataloader(self):
        data = TensorDataset(torch.linspace(-1, 1, 16 * 32).view(16, 32))
        ranks = {"num_replicas": self.trainer.world_size, "rank": self.trainer.global_rank}
        return DataLoader(data, batch_size=2, sampler=DistributedSampler(data, shuffle=False, **ranks))


if __name__ == "__main__":
    L.seed_everything(0)
    trainer = L.Trainer(
        max_epochs=2,
        log_every_n_steps=1,  # what is joined over ranks at each step there, is joined at log intervals here
        limit_val_batches=0,
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Model()
    trainer.fit(model)
    found = {name: float(value) for name, value in trainer.callback_metrics.items()}
    found["weight"] = model.layer.weight.double().sum().item()
    found["world_size"] = trainer.world_size
    found["arguments"] = sys.argv[1:]
    if trainer.is_global_zero:
        sys.stdout.write(json.dumps(found) + "\n")
