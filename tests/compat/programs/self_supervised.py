"""lightly: SimCLR on made pictures, then a linear classifier on what it learned."""

import json
import logging
import warnings

import numpy as np
import pytorch_lightning as pl
import torch
from lightly.loss import NTXentLoss
from lightly.models.modules import SimCLRProjectionHead
from lightly.transforms import SimCLRTransform
from lightly.utils.benchmarking import LinearClassifier, OnlineLinearClassifier
from lightly.utils.scheduler import CosineWarmupScheduler
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

warnings.filterwarnings("ignore")
logging.getLogger("lightning").setLevel(logging.ERROR)


class Pictures(Dataset):
    """Squares of a few colours; the colour is the class."""

    def __init__(self, transform):
        self.transform = transform

    def __len__(self):
        return 48

    def __getitem__(self, index):
        if index >= 48:
            raise IndexError(index)
        pixels = np.random.default_rng(index).integers(0, 60, (16, 16, 3), dtype=np.uint8)
        pixels[..., index % 3] += 180
        return self.transform(Image.fromarray(pixels)), index % 3


class SimCLR(pl.LightningModule):
    """A small backbone, a projection head, and a classifier that learns beside them."""

    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, 8, 3, 2), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten()
        )
        self.projection_head = SimCLRProjectionHead(32, 32, 16)
        self.criterion = NTXentLoss(gather_distributed=True)
        self.online = OnlineLinearClassifier(feature_dim=32, num_classes=3, topk=(1, 2))

    def forward(self, x):
        return self.backbone(x)

    def training_step(self, batch, batch_index):
        views, targets = batch
        features = self(torch.cat(views))
        one, two = self.projection_head(features).chunk(2)
        loss = self.criterion(one, two)
        self.log("train_loss", loss, batch_size=len(targets))
        other, values = self.online.training_step((features.detach(), targets.repeat(2)), batch_index)
        self.log_dict(values, batch_size=len(targets))
        return loss + other

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.06)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = {
            "scheduler": CosineWarmupScheduler(optimizer, warmup_epochs=2, max_epochs=steps),
            "interval": "step",
        }
        return [optimizer], [schedule]


pl.seed_everything(1)
transform = SimCLRTransform(input_size=16, gaussian_blur=0.0)
loader = DataLoader(Pictures(transform), batch_size=16, shuffle=True, drop_last=True)
quiet = {"accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False, "logger": False}
model = SimCLR()
trainer = pl.Trainer(max_epochs=3, enable_checkpointing=False, **quiet)
trainer.fit(model, loader)
logged = {name: value.item() for name, value in trainer.callback_metrics.items()}

pictures = torch.stack([torch.from_numpy(np.asarray(image)) for image, _ in Pictures(lambda image: image)])
pictures = pictures.permute(0, 3, 1, 2) / 255
data = TensorDataset(pictures, torch.arange(48) % 3)
pl.seed_everything(2)
linear = LinearClassifier(model=model, batch_size_per_device=16, feature_dim=32, num_classes=3, topk=(1, 2))
evaluator = pl.Trainer(max_epochs=2, enable_checkpointing=False, **quiet)
evaluator.fit(linear, DataLoader(data, 16), DataLoader(data, 16))
print(
    json.dumps(
        {
            "pretraining": logged,
            "lr": trainer.optimizers[0].param_groups[0]["lr"],
            "linear": {name: value.item() for name, value in evaluator.callback_metrics.items()},
            "weights": sum(value.double().abs().sum().item() for value in model.backbone.parameters()),
        }
    )
)
