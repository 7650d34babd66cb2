"""finetuning-scheduler: phases by early stopping, by epochs, and with another optimizer and schedule."""

import json
import warnings
from pathlib import Path

import lightning as L
import torch
from finetuning_scheduler import FinetuningScheduler, FTSCheckpoint, FTSEarlyStopping
from lightning.pytorch.loggers import CSVLogger
from same_generators import KeepGenerators
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

warnings.filterwarnings("ignore")


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 8), nn.ReLU())
        self.head = nn.Linear(8, 1)

    def loss(self, batch):
        return nn.functional.mse_loss(self.head(self.body(batch[0])), batch[1])

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self):
        optimizer = torch.optim.SGD((one for one in self.parameters() if one.requires_grad), lr=0.05, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch)]


def loader(seed, **more):
    x = torch.randn(48, 6, generator=torch.Generator().manual_seed(seed))
    return DataLoader(TensorDataset(x, (x[:, :3] * x[:, 3:]).sum(1, keepdim=True)), batch_size=16, **more)


ADAM = {"class_path": "torch.optim.Adam", "init_args": {"lr": 0.01}}
STEPS = {"class_path": "torch.optim.lr_scheduler.StepLR", "init_args": {"step_size": 1, "gamma": 0.7}}
LATER = {
    "new_optimizer": {"optimizer_init": ADAM},
    "new_lr_scheduler": {"lr_scheduler_init": STEPS, "pl_lrs_cfg": {"interval": "epoch"}},
}


def phases(**second):
    return {
        0: {"params": ["head.*"], "max_transition_epoch": 2},
        1: {"params": ["body.3.*"], "max_transition_epoch": 4, **second},
        2: {"params": ["body.0.*", "body.1.*"], "max_transition_epoch": 6},
    }


def run(scheduler, *callbacks, max_epochs=6):
    L.seed_everything(5)
    net, saving = Net(), FTSCheckpoint(monitor="val_loss", save_top_k=2)
    trainer = L.Trainer(
        accelerator="cpu", max_epochs=max_epochs, callbacks=[scheduler, *callbacks, saving, KeepGenerators()],
        logger=CSVLogger("."), enable_progress_bar=False, enable_model_summary=False, log_every_n_steps=1,
        num_sanity_val_steps=0,
    )  # fmt: skip
    trainer.fit(net, loader(1, shuffle=True), loader(2))
    return {
        "epochs": trainer.current_epoch,
        "depth": [scheduler.curr_depth, saving.best_ckpt_depth],
        "optimizer": type(trainer.optimizers[0]).__name__,
        "groups": [[len(group["params"]), group["lr"]] for group in trainer.optimizers[0].param_groups],
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "weights": [float(one.double().sum()) for one in net.parameters()],
        "rows": len((Path(trainer.log_dir) / "metrics.csv").read_text().splitlines()),
        "files": sorted(path.name for path in Path(trainer.log_dir).rglob("*.ckpt")),
    }


def by_epochs(**second):
    return FinetuningScheduler(ft_schedule=phases(**second), epoch_transitions_only=True)


stopping = FTSEarlyStopping(monitor="val_loss", patience=2, min_delta=0.02)
print(
    json.dumps(
        {
            "implicit": run(FinetuningScheduler(), stopping, max_epochs=30),
            "explicit": run(by_epochs(lr=1e-2)),
            "other_optimizer": run(by_epochs(**LATER)),
        }
    )
)
