"""chemprop: a message passing network on a few molecules, its best and last checkpoint, and predictions."""

import json
import warnings

import numpy as np
import torch
from chemprop import data, featurizers, models, nn
from lightning import pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint

warnings.filterwarnings("ignore")
pl.seed_everything(0)
names = ["C" * n + "O" for n in range(1, 13)] + ["C" * n + "N" for n in range(1, 13)]
names += ["c1ccccc1" + "C" * n for n in range(1, 9)]
targets = np.array([[len(name) * 0.1 + (0.5 if name.endswith("O") else 0)] for name in names])
points = [data.MoleculeDatapoint.from_smi(name, target) for name, target in zip(names, targets, strict=True)]
graphs = featurizers.SimpleMoleculeMolGraphFeaturizer()
train, val, test = (data.MoleculeDataset(part, graphs) for part in (points[::2], points[1::4], points[3::4]))
scaler = train.normalize_targets()
val.normalize_targets(scaler)
loaders = [data.build_dataloader(part, batch_size=8, num_workers=0, shuffle=False) for part in (train, val, test)]
head = nn.RegressionFFN(output_transform=nn.UnscaleTransform.from_standard_scaler(scaler))
model = models.MPNN(nn.BondMessagePassing(), nn.MeanAggregation(), head, True, [nn.metrics.RMSE(), nn.metrics.MAE()])
saving = ModelCheckpoint("molecules", "best-{epoch}-{val_loss:.2f}", "val_loss", mode="min", save_last=True)
trainer = pl.Trainer(
    max_epochs=6,
    accelerator="cpu",
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    callbacks=[saving],
)
trainer.fit(model, loaders[0], loaders[1])
logged = {name: value.item() for name, value in trainer.callback_metrics.items()}
tested = trainer.test(model, loaders[2], verbose=False)


def predict(network: models.MPNN) -> list[float]:
    return torch.cat(trainer.predict(network, loaders[2])).flatten().tolist()


best = models.MPNN.load_from_checkpoint(saving.best_model_path)  # reads the file with torch.load, too
last = models.MPNN.load_from_file(saving.last_model_path)
print(
    json.dumps({"logged": logged, "test": tested, "now": predict(model), "best": predict(best), "last": predict(last)})
)
