"""lightning-kfold: folds by one Trainer each, with the same callbacks and logger, and a checkpoint of each fold."""

import json
import warnings

import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning_kfold import KFoldDataModule, KFoldTrainer
from torch import nn
from torch.utils.data import TensorDataset

warnings.filterwarnings("ignore")
L.seed_everything(3)
LABELS = torch.randint(0, 3, (60,))
POINTS = torch.randn(60, 4) + LABELS[:, None]


class Folds(KFoldDataModule):
    def setup_datasets(self):
        return TensorDataset(POINTS, LABELS), TensorDataset(POINTS[:20], LABELS[:20]), LABELS.numpy()


class Net(L.LightningModule):
    def __init__(self, width=8):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(width, 3))

    def forward(self, points):
        return self.net(points)

    def training_step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", nn.functional.cross_entropy(self(batch[0]), batch[1]))

    def test_step(self, batch, batch_idx):
        self.log("test_loss", nn.functional.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 0.02)


np.random.seed(0)
data = Folds(num_folds=3, batch_size=8)
data.setup()
model = Net()
stopping, saving = EarlyStopping("val_loss", patience=1), ModelCheckpoint(monitor="val_loss")
trainer = KFoldTrainer(
    num_folds=3, max_epochs=2, accelerator="cpu", log_every_n_steps=1, enable_progress_bar=False,
    logger=CSVLogger("logs"), callbacks=[stopping, saving],
)  # fmt: skip
trainer.fit(model, data)
print(
    json.dumps(
        {
            "folds": trainer.fold_results,
            "weights": [value for one in model.parameters() for value in one.flatten().tolist()],
            "stopping": [stopping.wait_count, float(stopping.best_score), stopping.stopped_epoch],
            "best": [saving.best_model_path, float(saving.best_model_score)],
        }
    )
)
